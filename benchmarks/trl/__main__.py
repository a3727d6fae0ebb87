"""TRL's GRPO compared with an asynchronous campaign: seconds per step, tokens per second, and the rewards they lead to.

    one start model, one file of prompts ─┬─► TRL in its own environment, both cores  ─► steps ─┐
                                          └─► campaign, one core per stage            ─► steps ─┴─► ratios of each pair

Pairs of runs take turns in which side is first, and figures are medians over the pairs. Both sides sample 8 responses
per prompt at temperature 1, subtract the group's mean reward, average over tokens, and use AdamW with the same learning
rate. TRL is on policy, so its clip does nothing; the campaign may be two versions behind and weights tokens up to 2.
Neither writes checkpoints or evaluates while it is timed.

    python -m benchmarks.trl [--shapes short …] [--pairs 3] [--steps N] [--set KEY=VALUE …] [--json PATH]
"""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import add_settings, finish, make_parser, print_table, write_json
from benchmarks.trl.figures import Figures, of_pair, of_pairs, targets_met
from benchmarks.trl.runs import TRL, environment, run_millrace, run_trl
from benchmarks.trl.shapes import SHAPES, Shape, make_model, write_prompts


def main() -> None:
    """Runs the pairs, prints the comparison and writes it as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--pairs", type=int, default=3, help="runs of each side, per shape")
    parser.add_argument(
        "--steps", type=int, help="optimizer steps of each run; by default each shape has its own number"
    )
    parser.add_argument("--warmup", type=int, default=10, help="first steps that are not timed")
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path.home() / ".cache" / "millrace" / "trl",
        help="where TRL's environment (1.5 GB) and the start models are made and kept",
    )
    add_settings(parser)
    arguments = parser.parse_args()
    if arguments.pairs < 1 or arguments.warmup < 1:
        parser.error("--pairs and --warmup have to be at least 1")
    shapes = [SHAPES[name] for name in arguments.shapes]
    fewest = min(arguments.steps or shape.steps for shape in shapes)
    if fewest <= arguments.warmup:
        parser.error(f"--steps is {fewest}; expected more than --warmup, {arguments.warmup}")
    arguments.cache.mkdir(parents=True, exist_ok=True)
    python = environment(arguments.cache / "environment")
    result: dict[str, Any] = {"trl": TRL, "shapes": {}}
    for shape in shapes:
        steps = arguments.steps or shape.steps
        result["shapes"][shape.name] = compare(
            shape, python, arguments.cache, arguments.pairs, steps, arguments.warmup, arguments.set
        )
        # The shapes measured so far survive an interruption.
        write_json(arguments.json, result)
    result["targets"] = targets_met(result["shapes"])
    _print(result)
    finish(arguments.json, result)


def compare(
    shape: Shape, python: Path, cache: Path, pairs: int, steps: int, warmup: int, settings: list[str]
) -> Figures:
    """Runs pairs of one shape and compares them."""
    prompts, model = prepared(shape, cache)
    compared = []
    with tempfile.TemporaryDirectory(prefix="millrace-benchmark-") as root:
        for number in range(pairs):
            ours = partial(run_millrace, shape, model, prompts, steps=steps, seed=number, settings=settings)
            run_their_side = partial(run_trl, python, shape, model, prompts, steps=steps, seed=number)
            ours_folder, trl_folder = (Path(root) / f"{side}-{number}" for side in ("millrace", "trl"))
            # Each side is the first one in turn.
            if number % 2:
                millrace, trl = ours(ours_folder), run_their_side(trl_folder)
            else:
                trl, millrace = run_their_side(trl_folder), ours(ours_folder)
            compared.append(of_pair(trl, millrace[0], shape, warmup) | {"stage_seconds": millrace[1]})
    return of_pairs(compared)


def prepared(shape: Shape, cache: Path) -> tuple[Path, Path]:
    """The prompts' file and the start model's folder, made unless they are in `cache` already."""
    folder = cache / shape.name
    prompts, model = folder / "prompts.jsonl", folder / "model"
    if not model.exists():
        folder.mkdir(exist_ok=True)
        write_prompts(shape, prompts)
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            make_model(shape, prompts, Path(unfinished) / "model")
            (Path(unfinished) / "model").rename(model)
    return prompts, model


def _print(result: dict[str, Any]) -> None:
    rewards = ("reward_first", "reward_last", "reward_after_equal_time")
    rows = []
    for name, shape in result["shapes"].items():
        for side in ("trl", "millrace"):
            figures = shape[side]
            speeds = [f"{figures['seconds_per_step']:.3f}", f"{figures['tokens_per_second']:,.0f}"]
            rows.append([f"{name}, {side}", *speeds, *(f"{figures[key]:.3f}" for key in rewards)])
    headings = ("", "s/step", "tokens/s", "reward at first", "after equal steps", "after equal time")
    print_table("TRL and Millrace", headings, rows)


if __name__ == "__main__":
    main()
