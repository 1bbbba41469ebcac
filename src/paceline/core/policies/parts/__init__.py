"""What policies are composed of: `order` (who is next), `capacity` (who may stay), `chunking` (how much)."""
