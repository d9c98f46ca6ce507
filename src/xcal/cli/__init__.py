"""What the user types: parses, calls, prints."""
