"""Measuring: bytes by role, deviation from the reference, time and memory."""
