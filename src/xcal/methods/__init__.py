"""One short file a method: which step, which schedule, which guarantee."""
