"""Stands for NVIDIA Apex: its names, and nothing behind them."""
