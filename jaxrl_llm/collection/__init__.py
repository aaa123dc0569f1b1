"""Data from a model's own answers: right answers as texts, pairs of right and wrong ones, steps with labels."""
