"""docs/api.md: the public Python API, from its signatures and docstrings; docs/install.md: the extras, from pyproject.toml."""

import inspect
import re
import tomllib
from typing import Any

from pages import ROOT, part, table

OPENED = re.compile(r"^(Args|Returns|Raises|Attributes|Shapes|Source): ?(.*)$")
ENTRY = re.compile(r"^ {4}(\w[\w, ]*): (.*)$")
EXTRAS = {  # what each adds, and what happens without it
    "cuda": ("lowq's own CUDA kernels, compiled for your GPU at the first use", "products and attention by Triton's kernels"),
    "plot": ("`lowq bench --plot`, `lowq compare --plot`", "one line that names the package"),
    "grammar": ("`lowq serve`: answers that follow a JSON schema, forced tool calls", "such requests get 400, and the reason"),
    "eval": ("`lowq eval --tasks`", "one line that names the package; perplexity and KL divergence work"),
    "test": ("what `make test` needs", "nothing for a user"),
    "interop": ("real readers that judge exports in tests", "those tests are skipped"),
}


@part
def extras() -> str:
    """A row for each extra."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert known.keys() == EXTRAS.keys(), "each extra needs a row in EXTRAS"
    rows = []
    for name, packages in known.items():
        installs = ", ".join(dict.fromkeys(re.match(r"[\w-]+", p)[0] for p in packages))  # type: ignore[index]
        rows.append((f"`{name}`", installs, *EXTRAS[name]))
    return table(("extra", "installs", "adds", "without it"), rows)


@part
def api() -> str:
    """Every public name: functions first, then classes."""
    import lowq

    values = [(name, getattr(lowq, name)) for name in lowq.__all__]
    order = sorted(values, key=lambda v: inspect.isclass(v[1]))
    return "\n".join(_described(f"lowq.{name}", value) for name, value in order)


def _described(name: str, value: Any) -> str:
    """A heading, the signature, and the docstring; of a class also its public methods."""
    own = [f"## {name}\n"]
    if not (inspect.isclass(value) and issubclass(value, Exception)):
        own.append(f"```python\n{_signature(name, value)}\n```\n")
    own.append(_prose(inspect.getdoc(value) or ""))
    if inspect.isclass(value):
        methods = [(n, m) for n, m in vars(value).items() if not n.startswith("_") and _documented(m)]
        own += [f"- `{_short(n, m)}`: {_first(m)}" for n, m in methods]
        own += [""] * bool(methods)
    return "\n".join(own)


def _documented(member: Any) -> bool:
    return isinstance(member, property | classmethod | staticmethod) or inspect.isfunction(member)


def _function(member: Any) -> Any:
    return member.fget if isinstance(member, property) else getattr(member, "__func__", member)


def _short(name: str, member: Any) -> str:
    if isinstance(member, property):
        return name
    given = [p for p in inspect.signature(_function(member)).parameters if p not in ("self", "cls")]
    return f"{name}({', '.join(given)})"


def _first(member: Any) -> str:
    return (inspect.getdoc(_function(member)) or "").partition("\n\n")[0].replace("\n", " ")


def _signature(name: str, value: Any) -> str:
    """As it is written, a parameter a line."""
    given = inspect.signature(value)
    inside = "".join(f"    {_parameter(p)},\n" for p in given.parameters.values())
    back = "" if given.return_annotation in (inspect.Signature.empty, None) else f" -> {_named(given.return_annotation)}"
    return f"{name}(\n{inside}){back}"


def _parameter(p: inspect.Parameter) -> str:
    kind = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
    of = "" if p.annotation is p.empty else f": {_named(p.annotation)}"
    return f"{kind}{p.name}{of}" + ("" if p.default is p.empty else f" = {p.default!r}")


def _named(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"(?:\w+\.)+(?=[A-Z])", "", text)


def _prose(doc: str) -> str:
    """A docstring as Markdown: its sections become lists."""
    lines, section = list[str](), ""
    for line in doc.splitlines():
        if opened := OPENED.match(line):
            section = opened[1]
            lines += ["", f"**{section}:** {opened[2]}".rstrip(), ""]
        elif section and (entry := ENTRY.match(line)):
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        else:
            lines.append(f"  {line.strip()}" if section and line.strip() else line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"
