"""gpt-oss: a sink for each head, windows in every second layer, biases everywhere, a mixture whose gate is clamped."""

from lowq_packers.families import Family, Mixture

FAMILY = Family(
    "gpt_oss",
    {},  # transformers reads its config
    sinks=True,
    mixture=Mixture(True, router="router", router_bias=True, rounded=True, width="intermediate_size"),
    windows="by layer_types",
    llama_shapes=False,
    stacked="its files hold all experts of a layer in one tensor",
    not_rotated="biases of its experts would have to be rotated, too",
)
