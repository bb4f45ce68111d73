"""What training would take: a line of the plan of a budget of bits that no text is read for."""

from dataclasses import replace

import torch

from lowq_cli.calibrate.cost import WITHIN, seconds
from lowq_cli.calibrate.requirements import tokens_for
from lowq_cli.console import duration
from lowq_cli.files.source import Source
from lowq_cli.plan.planner import make_plan
from lowq_cli.plan.recipe import Recipe, in_its_format
from lowq_cli.run import own_text_plan


def offer(model: str, source: Source, recipe: Recipe, device: torch.device) -> str:
    """The line for a recipe whose bits are placed. Raises the errors of `make_plan`."""
    trained = in_its_format(replace(recipe, method="distill", calib=None))
    if device.type == "cuda":
        trained = replace(trained, calib_tokens=tokens_for(make_plan(source, trained)))
    trained, own, _ = own_text_plan.decide(model, source, trained, device)
    took = seconds(make_plan(source, trained), device) + (own.seconds if own else 0.0)
    return (
        f"--method distill loses less in as many bits: it trains all layers together, about {duration(took)} (within {WITHIN}x)"
    )
