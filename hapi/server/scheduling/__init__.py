"""Scheduling and fairness: admission and fair shares."""
