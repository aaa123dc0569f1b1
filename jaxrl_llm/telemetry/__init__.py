"""What a run writes down and what it shows: rows, curves, progress, and the summary at its end."""
