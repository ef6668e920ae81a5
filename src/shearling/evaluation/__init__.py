"""Scores: metrics, exams, and two models side by side."""
