"""route: which engine of many a request goes to. `policies` are pure: they know core alone, no clock, no network."""
