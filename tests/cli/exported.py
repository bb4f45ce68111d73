"""What tests of exports and imports share: schemes that formats hold, and the weights of an open source."""

from lowq_packers.scheme import Scheme

INT4 = {"attention": Scheme(4, 32, "int"), "mlp": Scheme(4, 32, "int"), "expert": Scheme(4, 16, "int")}
SYM = {"attention": Scheme(4, 32, "none"), "mlp": Scheme(8, 32, "none"), "expert": Scheme(4, 16, "none")}
FLOAT = {"attention": Scheme(4, 32, "float"), "mlp": Scheme(2, 32, "float")}
HEAD = {"head": Scheme(8, 64, "none")}


def dense_tensors(source):
    """Every tensor of an open source, by name."""
    return {n: source.read(n).reshape(h.shape) for n, h in source.headers.items()}
