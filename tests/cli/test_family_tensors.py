"""A described family's plan needs no model: names, shapes and roles from its config equal those of transformers' model."""

import pytest

from lowq_cli.files.family_tensors import known_roles
from lowq_cli.files.source import open_source
from lowq_cli.hf import structure

KNOWN = ("llama", "llama-tied", "qwen2", "qwen3", "mistral", "gemma3", "phi3", "mixtral", "qwen3-moe")


@pytest.fixture
def source(request, family_checkpoints):
    with open_source(family_checkpoints(request.param).dense) as opened:
        yield opened


@pytest.mark.parametrize("source", KNOWN, indirect=True)
def test_the_roles_of_a_known_family_are_those_of_its_model(source):
    result = known_roles(source.config, source.headers)
    assert result == structure.roles(source.config, source.headers)
    assert list(result) == list(source.headers)


@pytest.mark.parametrize("source", ["llama"], indirect=True)
@pytest.mark.parametrize(
    "change", [{"hidden_size": 128}, {"tie_word_embeddings": True}, {"attention_bias": True}, {"hidden_act": "tanh"}], ids=str
)
def test_tensors_that_the_config_does_not_ask_for_are_left_to_transformers(source, change):
    assert known_roles(source.config | change, source.headers) is None


@pytest.mark.parametrize("source", ["gpt2"], indirect=True)
def test_another_family_is_left_to_transformers(source):
    assert known_roles(source.config, source.headers) is None
