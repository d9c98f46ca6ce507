"""What is measured: every metric with its name, direction and range."""
