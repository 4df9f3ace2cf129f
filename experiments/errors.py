"""Failures of a run, as opposed to wrong input."""

from launch.errors import RunError

__all__ = ['RunError']
