"""What a run writes for people: metrics, progress, tables and figures."""
