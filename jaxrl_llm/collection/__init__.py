"""Data from a model's own answers: right ones to learn, right ones against wrong ones, steps with their labels."""
