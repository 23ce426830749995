"""Problems, from files and generated."""

from dclightning.data.problems import Problem, load_problems

__all__ = ["Problem", "load_problems"]
