"""One fresh checkout, and the demo's run in it, for all tests of this folder."""

from collections.abc import Iterator

import pytest
from support.campaigns.first_moves import Checkout, fresh_checkout


@pytest.fixture(scope="session")
def checkout() -> Iterator[Checkout]:
    with fresh_checkout() as made:
        yield made


@pytest.fixture(scope="session")
def demo(checkout: Checkout) -> str:
    """The URL of the demo's run, made by `make demo` with 10 steps in place of 250."""
    preset = checkout.folder / "configs/presets/tiny-cpu.yaml"
    text = preset.read_text()
    assert "max_steps: 250" in text
    checkout.write("configs/presets/tiny-cpu.yaml", text.replace("max_steps: 250", "max_steps: 10"))
    checkout.run("make demo").succeeded()
    [run] = (checkout.folder / "runs").glob("tiny-cpu-*")
    return f"runs/{run.name}"


@pytest.fixture(scope="session")
def exported(checkout: Checkout, demo: str) -> str:
    """The folder of the demo's last version, exported as a model."""
    checkout.millrace(f"export {demo} --to my-model").succeeded()
    return "my-model"
