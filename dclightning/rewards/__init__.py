"""Rewards: functions of problems and completions that give each completion a number, or None."""
