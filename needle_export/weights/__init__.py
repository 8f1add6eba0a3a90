"""Number formats and weight schemes, without file formats.

float32 and float16 need no arithmetic of their own, and a target stores them as they are.
"""
