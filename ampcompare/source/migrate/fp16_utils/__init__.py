"""Rewrite training by `apex.fp16_utils` as `amp.initialize` at O2."""
