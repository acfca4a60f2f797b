"""Engines that let the target write."""
