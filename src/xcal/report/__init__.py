"""What was trained, shown: reads runs and draws them, never trains."""
