"""The durable record of what was paid: SQLite, append-only, hash-chained, synced first."""
