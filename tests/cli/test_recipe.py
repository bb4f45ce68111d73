"""Recipes: flags and TOML mean the same, mistakes are named, patterns match the right names."""

from dataclasses import fields

import pytest
from typer.testing import CliRunner

from lowq_cli import quantizers, recipes
from lowq_cli.commands.quantize import FLAGS
from lowq_cli.main import app
from lowq_cli.plan.recipe import Recipe, make_recipe
from lowq_cli.plan.values import Override, matches
from lowq_packers.errors import NotFoundError, UsageError

NAMES = [f"model.layers.{i}.{m}" for i in range(12) for m in ("mlp.down_proj", "mlp.up_proj", "self_attn.q_proj")] + ["lm_head"]


def test_toml_and_flags_give_the_same_recipe(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text(
        'bits = 3\ngroup = "channel"\nlm_head = 8\nskip = ["layers.0"]\n[overrides]\n'
        '"*.down_proj" = "8:64"\n"up_proj" = 4\n"q_proj" = {bits = 2, group = 32}\n"layers.1" = "keep"\n'
    )
    flags = make_recipe(
        bits="3",
        group="channel",
        lm_head="8",
        skip=["layers.0"],
        overrides=["*.down_proj=8:64", "up_proj=4", "q_proj=2:32", "layers.1=keep"],
    )
    assert make_recipe(path) == flags
    assert make_recipe(**flags.to_json()) == flags
    assert make_recipe(path, bits=4).bits == 4
    assert make_recipe(path, overrides=["q_proj=8"]).overrides[-1] == Override("q_proj", 8)


@pytest.mark.parametrize("given", [{}, {"format": "lowq"}, {"group": 32}, {"zero": "int"}, {"act": "int8"}], ids=str)
def test_a_budget_of_distill_is_placed_among_tables_unless_the_grid_is_given(given):
    recipe = make_recipe(method="distill", bpw=3.5, **given)
    assert recipe.format == ("lowq" if given else "table-e4m3")
    assert make_recipe(method="gptq", bpw=3.5, **given).format == make_recipe(method="distill", **given).format == "lowq"


def test_defaults_are_those_of_the_dataclass():
    assert make_recipe() == Recipe() == make_recipe(bits=None, overrides=None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bits": 5}, "bits: 5 is not a width lowq packs; use one of 8, 4, 3, 2, 1"),
        ({"bits": "four"}, "not a whole number"),
        ({"bits": True}, "not a whole number"),
        ({"group": 24}, "^group 24 is neither a positive multiple of 16"),
        ({"group": 0}, "neither a positive multiple"),
        ({"group": "row"}, "not a whole number"),
        ({"method": "gtpq"}, f"'gtpq' does not exist; use one of auto, {', '.join(quantizers.methods())}"),
        ({"group": "abc"}, "group='abc' is not a whole number and not 'channel'; use 32, 64, 128 or channel"),
        ({"bits": {"default": 4}}, r"bits=\[a table of default\] is not a whole number"),
        ({"skip": [{"layer": 1}]}, r"skip=\[\[a table of layer\]\] must be a list of patterns"),
        ({"embedding": 5}, "embedding: 5 is not a width"),
        ({"zero": "maybe"}, "zero='maybe' does not exist"),
        ({"dtype": "int8"}, "dtype='int8' does not exist"),
        ({"layout": "spiral"}, "layout='spiral' does not exist"),
        ({"lm_head": 5}, "lm_head: 5 is not a width"),
        ({"overrides": ["down_proj"]}, "has no '='"),
        ({"overrides": ["=8"]}, "needs a pattern"),
        ({"overrides": ["down_proj=9"]}, "override down_proj: 9 is not a width"),
        ({"overrides": ["down_proj=8:20"]}, "override down_proj: group 20"),
        ({"overrides": ["down_proj=keep:64"]}, "a tensor that is kept has no group"),
        ({"overrides": {"down_proj": {"bit": 8}}}, "unknown key 'bit'; did you mean 'bits'"),
        ({"overrides": "down_proj=8"}, "must be a table"),
        ({"skip": "down_proj"}, "must be a list of patterns"),
        ({"grup": 64}, "unknown key 'grup'; did you mean 'group'"),
    ],
)
def test_mistakes_are_named(given, message):
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        make_recipe(**given)


def test_bad_recipe_files(tmp_path):
    for text in ("bits = ", "x = " + "[" * 5000):
        (tmp_path / "r.toml").write_text(text)
        with pytest.raises(UsageError, match="not valid TOML"):
            make_recipe(tmp_path / "r.toml")
    (tmp_path / "r.toml").write_text("bitz = 4")
    with pytest.raises(UsageError, match="did you mean 'bits'"):
        make_recipe(tmp_path / "r.toml")
    for text in ("bits = 5", 'group = "x"', "lm_head = []"):
        (tmp_path / "r.toml").write_text(text)
        with pytest.raises(UsageError, match=r"^recipe .*r\.toml: "):
            make_recipe(tmp_path / "r.toml")
    with pytest.raises(UsageError, match=r"^group 24 is"):
        make_recipe("small", group=24)
    with pytest.raises(NotFoundError):
        make_recipe(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("down_proj", 12),
        ("*.down_proj", 12),
        (".*down_proj", 12),
        ("layers.1", 3),  # not layers 10 and 11
        ("layers.[01].*", 6),
        (r"layers\.(1|11)\.", 6),
        ("model.layers.3.mlp", 2),
        ("mlp.*_proj", 24),
        ("lm_head", 1),
        ("*", len(NAMES)),
    ],
)
def test_a_pattern_fits_whole_components_or_is_a_regular_expression(pattern, count):
    assert len(matches(pattern, NAMES)) == count


@pytest.mark.parametrize(
    ("pattern", "hint"), [("dwn_proj", "did you mean 'down_proj'"), ("[", "inspect MODEL --tensors lists")]
)
def test_a_pattern_that_fits_nothing_is_a_mistake(pattern, hint):
    with pytest.raises(UsageError, match=hint):
        matches(pattern, NAMES)


@pytest.mark.parametrize("name", recipes.names())
def test_a_recipe_of_a_name_is_whole_and_flags_win_over_it(name):
    first = recipes.path(name).read_text().splitlines()[0]
    assert first.startswith("# ")
    assert make_recipe(name) != make_recipe(name, bits=2)
    assert make_recipe(name, bits=2).bits == 2


def test_the_three_recipes_go_from_small_to_large():
    assert [make_recipe(n).bits for n in recipes.names()] == [3, 4, 8]
    with pytest.raises(NotFoundError, match="one of small, balanced, best"):
        make_recipe("smal")


def test_every_field_has_its_option():
    assert set(FLAGS) == {f.name for f in fields(Recipe)}


@pytest.mark.parametrize(
    "flag", [f"--{n}" for n in ["method", "zero", "act", "dtype", "layout", "format", "lm-head", "embedding"]]
)
def test_a_wrong_value_is_named_as_it_was_given(flag, tmp_path):
    """At the command line by its flag, and in a file by its field."""
    field = flag[2:].replace("-", "_")
    (tmp_path / "r.toml").write_text(f'{field} = "odd"\n')
    for words, named in (([flag, "odd"], flag), (["--recipe", str(tmp_path / "r.toml")], field)):
        told = CliRunner().invoke(app, ["quantize", "demo", *words, "--dry-run"]).exception
        assert isinstance(told, UsageError)
        assert "odd" in str(told)
        assert (flag in str(told)) == (named == flag), str(told)
