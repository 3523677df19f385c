"""Optimiser steps, and what guards them."""
