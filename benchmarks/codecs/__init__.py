"""Codecs on features of trained layers: ratio, speed, and the accuracy that rounding costs."""
