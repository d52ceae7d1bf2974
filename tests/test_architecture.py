"""The shape of the house: floors, face, light imports, and pages whose links lead somewhere."""

from __future__ import annotations

import ast
import compileall
import importlib
import inspect
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hadal
from hadal import errors
from hadal.config.document import anchor

ROOT = Path(__file__).parent.parent
DOCS = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("docs/tutorials/*.md")])
PAGES = sorted(
    [*ROOT.glob("*.md"), *DOCS, *ROOT.glob("benchmarks/*.md"), *ROOT.glob("examples/*.md")]
)


def python(code: str, **variables: str) -> str:
    """Run code in a fresh interpreter; return what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- floors -----------------------------------------------------------------------------------


def test_imports_go_down_only() -> None:
    script = Path(sys.executable).with_name("lint-imports")
    if not script.exists():
        pytest.skip("import-linter is not installed beside this Python")
    done = subprocess.run(
        [str(script), "--no-logo", "--no-cache"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_below_the_command_imports_the_face() -> None:
    """The contracts leave the face's own imports out, so its use from below is looked for here."""
    house = ROOT / "hadal"
    allowed = {path.stem for path in house.iterdir()} | {"__version__"}
    for file in sorted(house.rglob("*.py")):
        where = file.relative_to(house)
        if where.parts[0] in {"__init__.py", "cli", "compat"}:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                taken = {alias.name for alias in node.names if alias.name == "hadal"}
            elif isinstance(node, ast.ImportFrom) and node.module == "hadal" and not node.level:
                taken = {alias.name for alias in node.names} - allowed
            else:
                continue
            assert not taken, f"hadal/{where}:{node.lineno} takes {taken} from the face"


# ---- the face ---------------------------------------------------------------------------------


def test_the_face_is_exactly_this() -> None:
    own_errors = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, BaseException)
    }
    assert all(issubclass(getattr(errors, name), errors.HadalError) for name in own_errors)
    assert set(hadal.__all__) == own_errors | {
        "Engine",
        "Forward",
        "Listener",
        "RepeatingLoader",
        "Update",
        "__version__",
        "add_config_arguments",
        "add_tuning_arguments",
        "comm",
        "init_distributed",
        "initialize",
        "install_as_deepspeed",
        "plan",
        "schedule_from_args",
        "set_z3_leaf_modules",
        "unset_z3_leaf_modules",
        "utils",
        "zero",
    }
    assert len(hadal.__all__) == len(set(hadal.__all__))


@pytest.mark.parametrize("name", sorted(hadal.__all__))
def test_every_name_of_the_face_is_there(name: str) -> None:
    assert getattr(hadal, name) is not None
    assert name in dir(hadal)


@pytest.mark.parametrize(
    "folder", sorted(path.parent.name for path in ROOT.glob("hadal/plugins/*/__init__.py"))
)
def test_a_plugin_is_one_module_under_its_public_name(folder: str) -> None:
    public = importlib.import_module(f"hadal.{folder}")
    assert public is importlib.import_module(f"hadal.plugins.{folder}")
    inside = sorted(ROOT.glob(f"hadal/plugins/{folder}/[a-z]*.py"))[0].stem
    assert importlib.import_module(f"hadal.{folder}.{inside}") is importlib.import_module(
        f"hadal.plugins.{folder}.{inside}"
    )


def test_type_checkers_find_plugins_under_their_public_names() -> None:
    stubs = {path.stem: path.read_text() for path in Path(hadal.__file__).parent.glob("*.pyi")}
    assert stubs == {name: f"from hadal.plugins.{name} import *\n" for name in hadal._PLUGINS}


@pytest.mark.slow
def test_a_program_is_checked_by_mypy(tmp_path: Path) -> None:
    text = "".join(f"import hadal.{name}\n" for name in hadal._PLUGINS)
    text += "from hadal.moe import MoE\nMoE('wide')\n"
    (tmp_path / "program.py").write_text(text)
    checked = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path)]
    done = subprocess.run(
        [*checked, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert 'Argument 1 to "MoE" has incompatible type "str"; expected "int"' in done.stdout
    assert done.stdout.count("error:") == 2, done.stdout  # and it lacks arguments


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="initialise"):
        hadal.initialise  # noqa: B018


# ---- light imports ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module",
    [
        "hadal",
        "hadal.errors",
        "hadal.config",
        "hadal.launcher.front",
        "hadal.cli.main",
        "hadal.utils",
    ],
)
def test_imports_no_torch(module: str) -> None:
    importlib.import_module(module)  # a missing module should read as one
    loaded = python(f"import sys, {module}; print('torch' in sys.modules)")
    assert loaded.strip() == "False"


def test_no_command_imports_torch_before_it_runs() -> None:
    """A subcommand imports what it needs inside its functions: `hadal --help` starts fast."""
    loaded = python(
        "import importlib, pkgutil, sys, hadal.cli as cli\n"
        "for module in pkgutil.iter_modules(cli.__path__, 'hadal.cli.'):\n"
        "    importlib.import_module(module.name)\n"
        "print('torch' in sys.modules)"
    )
    assert loaded.strip() == "False"


@pytest.mark.slow
def test_initialize_costs_little_compared_with_torch(tmp_path: Path) -> None:
    # Both in processor time, one after the other: other work on the machine slows both alike. And
    # with the bytecode that an installation has, even where the environment forbids to write it.
    shutil.copytree(ROOT / "hadal", tmp_path / "hadal")
    assert compileall.compile_dir(tmp_path / "hadal", quiet=1)
    code = (
        "import sys, time; sys.path.pop(0);"  # where the test runs
        "began = time.process_time(); import torch; middle = time.process_time();"
        "from hadal import initialize; print(middle - began, time.process_time() - middle)"
    )

    def share() -> float:
        for_torch, for_hadal = map(float, python(code, PYTHONPATH=str(tmp_path)).split())
        return for_hadal / for_torch

    shares: list[float] = []
    while not shares or (min(shares) > 0.25 and len(shares) < 5):
        shares.append(share())
    assert min(shares) < 0.25, shares


# ---- words ------------------------------------------------------------------------------------


def test_no_two_classes_share_a_name() -> None:
    """But for the face of another library, which bears that library's names."""
    places: dict[str, list[str]] = {}
    for file in sorted((ROOT / "hadal").rglob("*.py")):
        if "compat" not in file.parts:
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(str(file.relative_to(ROOT)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_docstrings_begin_with_their_subject() -> None:
    """No `What`, `Whether` or `Of`: a docstring is a sentence or names a thing.

    A function's begins with a verb, unless it is a property.
    """
    questions = {"What", "Whether", "Of", "By", "Where", "How", "Who", "Why"}
    articles = {"The", "A", "An", "As", "All", "Each", "Every", "Everything", "Nothing", "No"}
    found = []
    for file in sorted((ROOT / "hadal").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                first = (ast.get_docstring(node) or "-").split()[0].strip(",:.")
                marks = getattr(node, "decorator_list", [])
                acts = isinstance(node, ast.FunctionDef) and not any(
                    "property" in ast.unparse(mark) for mark in marks
                )
                if first in questions | (articles if acts else set()):
                    found.append(f"{file.relative_to(ROOT)}: {ast.get_docstring(node)}")
    assert found == []


# ---- pages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, heading = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), f"{page.name} links to {target}"
        if heading:
            headings = re.findall(r"^#+ (.*)", there.read_text(), re.MULTILINE)
            assert heading in map(anchor, headings), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    """Every path in backquotes that begins with a folder of this repository exists."""
    named = r"`((?:hadal|tests|examples|benchmarks|docs)/[\w./-]*)`"
    for target in re.findall(named, page.read_text()):
        assert (ROOT / target).exists(), f"{page.name} names {target}"


def test_every_file_begins_with_a_line_about_it() -> None:
    """`make tree` prints these lines; nobody keeps a list of files by hand."""
    for file in sorted((ROOT / "hadal").rglob("*.py")):
        first = (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")[0]
        assert first.endswith((".", ":", "?")), f"{file.relative_to(ROOT)} begins with {first!r}"


def test_troubleshooting_has_every_error() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    found = {kind.__name__ for kind in vars(errors).values() if inspect.isclass(kind)}
    assert all(f"`{name}`" in page for name in found if name.endswith("Error"))


def _texts(module: Path) -> Iterator[str]:
    """Yield every text in a module's code but docstrings, in a line; each value in it is "..."."""
    tree = ast.parse(module.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (
                part.value if isinstance(part, ast.Constant) else "..." for part in node.values
            )
            yield " ".join("".join(map(str, parts)).split())
        elif isinstance(node, ast.Constant) and id(node) not in docstrings:
            yield " ".join(str(node.value).split())


def test_quoted_messages_exist() -> None:
    """`...` in a quotation of docs/troubleshooting.md is anything."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    quoted = re.findall(r"(?<![*\w])\*(?![*\s])([^*]+)\*(?!\*)", page)
    assert len(quoted) > 25
    texts = "\n".join(text for module in (ROOT / "hadal").rglob("*.py") for text in _texts(module))
    for quotation in quoted:
        parts = [re.escape(part.strip()) for part in " ".join(quotation.split()).split("...")]
        assert re.search(".*".join(parts), texts), f"no message says: {quotation}"


def test_the_glossary_is_short_and_has_each_term_once() -> None:
    page = (ROOT / "docs/words.md").read_text()
    terms = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", page, re.MULTILINE)[1:]
    assert 40 < len(terms) < 60
    assert terms == sorted(set(terms), key=str.lower)


def test_the_index_has_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text()
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in DOCS}
    listed = re.findall(r"^- \[[^]]+\]\(([\w/]+\.md)\): ", index, re.MULTILINE)
    assert sorted(listed) == sorted(pages - {"README.md", "index.md"})  # the site makes its index


def test_the_pictures_are_as_drawn() -> None:
    drawn = runpy.run_path(str(ROOT / "docs/pictures/draw.py"))["drawn"]()
    for name, text in drawn.items():
        path = ROOT / "docs/pictures" / name
        assert path.read_text() == text, f"{name} is stale; run: python docs/pictures/draw.py"


def test_every_variable_that_is_read_is_documented() -> None:
    page = (ROOT / "docs/environment.md").read_text()
    read = r'"((?:HADAL|DS|DEEPSPEED|MALLOC|SLURM|OMPI|PMI|MV2)_[A-Z_]+)"'
    code = "\n".join(file.read_text() for file in (ROOT / "hadal").rglob("*.py"))
    names = set(re.findall(read, code))
    assert len(names) > 20
    documented = re.findall(r"`([A-Z]\w+?\*?)`", page)
    patterns = "|".join(name.replace("*", r"\w+") for name in documented)
    assert [name for name in sorted(names) if not re.fullmatch(patterns, name)] == []


def test_the_pages_that_are_promised_are_there() -> None:
    promised = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE"]
    promised += [f"docs/{name}.md" for name in ("design", "words", "life_of_a_weight")]
    missing = [name for name in promised if not (ROOT / name).exists()]
    assert not missing


def test_one_file_creates_all_streams() -> None:
    """It says of each who follows whom, and who keeps the memory."""
    root = ROOT / "hadal"
    makers = [
        str(path.relative_to(root))
        for path in sorted(root.rglob("*.py"))
        if re.search(r"\b(SideStream|torch\.(\w+\.)?Stream)\(", path.read_text())
    ]
    assert makers == ["device/streams.py"]
