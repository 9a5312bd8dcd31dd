"""Proof: does a runtime compute what PyTorch computes? A module for each rung, `ladder.sit` climbs them all."""

from .ladder import sit
from .report import RUNGS, Report

__all__ = ["RUNGS", "Report", "sit"]
