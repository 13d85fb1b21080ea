"""Decide which lines are wrong: rules by subject; each function with `@register_rule` in a file is one."""
