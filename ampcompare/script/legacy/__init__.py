"""Run scripts that were written for Apex and that no one ported: what they see as `apex`, and what their steps did."""
