"""Evaluation: metrics, scoring on a task, comparison of two models."""
