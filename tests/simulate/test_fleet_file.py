"""Fleets from files: engines of several kinds, and errors that say where."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from paceline.core.config import SchedulerConfig
from paceline.cost.analytic import AnalyticCost
from paceline.cost.catalogue import find_chip, find_model
from paceline.cost.deployment import Deployment
from paceline.errors import ConfigError
from paceline.simulate.fleet import file as fleet_file
from paceline.simulate.fleet.blueprint import Role
from paceline.simulate.fleet.file import Base, fleet_parts, load_fleet
from tests.simulate.fleets import request, run
from tests.simulate.laws import Linear

DEPLOYMENT = Deployment(find_model("llama-3-8b"), find_chip("h100"))
BASE = Base(SchedulerConfig(num_blocks=4096, max_model_len=8192), AnalyticCost(DEPLOYMENT), DEPLOYMENT)
MEASURED = Base(SchedulerConfig(num_blocks=64, max_model_len=512), Linear())


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    return path


def example() -> str:
    """The file that the module's docstring shows."""
    text = (fleet_file.__doc__ or "").split("\n\n", 1)[1].rsplit("\n\n", 1)[0]
    return "\n".join(line.removeprefix("    ") for line in text.splitlines())


def test_the_example_in_the_documentation_is_served(tmp_path: Path) -> None:
    members, options = fleet_parts(load_fleet(written(tmp_path, example())), BASE, seed=0)
    assert [name for name, _ in members] == ["prefill-0", "prefill-1", *(f"decode-{i}" for i in range(4))]
    prefill, decode = members[0][1], members[-1][1]
    assert (prefill.role, prefill.chips, prefill.chip) == (Role.PREFILL, 2, "h100")
    assert (decode.role, decode.chips, decode.chip) == (Role.DECODE, 1, "l40s")
    assert decode.config.num_blocks < prefill.config.num_blocks  # what each chip's memory leaves
    result = run(members, [request(i, at_s=5.0 * i, prompt=600, output=20) for i in range(15)], **options)
    assert len(result.done) == 15
    assert result.outages == 1
    assert result.cost is None  # one kind has no price
    assert {tier.name for member in result.members for tier in member.tiers} == {"host"}
    assert max(count for journey in result.done for count in journey.token_counts) > 1  # drafts were accepted


def test_the_file_of_the_page_on_routing_is_accepted(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "routing.md").read_text("utf-8")
    (block,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    members, options = fleet_parts(load_fleet(written(tmp_path, block)), BASE, seed=0)
    assert len(members) == 6
    assert options["overlap_layers"] == 32
    assert len(options["outages"]) > 1


def test_the_example_of_the_page_on_routing_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "routing.md").read_text("utf-8")
    found = doctest.DocTestParser().get_doctest(page.replace("```", "\n"), {}, "routing.md", "routing.md", 0)
    assert found.examples
    assert doctest.DocTestRunner().run(found).failed == 0


def test_an_entry_that_says_nothing_is_the_engine_of_the_command_line(tmp_path: Path) -> None:
    file = load_fleet(written(tmp_path, '[[engines]]\nname = "e"\ncount = 2\nmax_num_seqs = 8\n'))
    for base in (BASE, MEASURED):
        ((_, blueprint), _), _ = fleet_parts(file, base, seed=0)
        assert blueprint.cost is base.cost
        assert blueprint.config.num_blocks == base.config.num_blocks
        assert blueprint.config.max_num_seqs == 8


def test_failures_are_drawn_from_the_seed(tmp_path: Path) -> None:
    text = '[[engines]]\nname = "e"\n[failures]\nmtbf_s = 10.0\ndown_s = 1.0\nuntil_s = 100.0\n'
    file = load_fleet(written(tmp_path, text))
    drawn = [fleet_parts(file, BASE, seed)[1]["outages"] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("engines = 3", "engines"),
        ('[[engines]]\nname = "e"\nchpi = "h100"', r"unknown field `chpi` - at `\$.engines\[0\]`"),
        ('[[engines]]\nname = "e"\nrole = "both"', r"role"),
        ("[[engines", "not TOML"),
        ('[[engines]]\nname = "e"\ncount = 0', "count is 0"),
        ('[[engines]]\nname = "e"\nchip = "h1000"', "h1000"),
        ('[[engines]]\nname = "e"\nmodel = "llama-3-70b"', "does not hold"),
        ('router = "magic"\n[[engines]]\nname = "e"', "router is 'magic'"),
        ('[[engines]]\nname = "e"\n[[tiers]]\nname = "host"\ncapacity_tokens = -1\ngbs = 1', "tier host"),
    ],
)
def test_files_that_cannot_be_used_say_why(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        fleet_parts(load_fleet(written(tmp_path, text)), BASE, seed=0)


def test_a_measured_engine_and_another_by_name_alone_cannot_be_mixed(tmp_path: Path) -> None:
    file = load_fleet(written(tmp_path, '[[engines]]\nname = "e"\nchip = "h100"'))
    with pytest.raises(ConfigError, match="give both or none"):
        fleet_parts(file, MEASURED, seed=0)
    with pytest.raises(ConfigError, match="cannot read the fleet"):
        load_fleet(tmp_path / "absent.toml")
