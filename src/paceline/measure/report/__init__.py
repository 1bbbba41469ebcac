"""What a run says, written down: one HTML file for people, JSON, CSV and JUnit for machines, lines for a terminal."""
