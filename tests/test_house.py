"""Tests of the house rules in docs/decisions.md."""

import ast
import functools
import io
import re
import statistics
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from embedfarm.cli.app import VERBS, Verbs, app
from embedfarm.contract.settings.__main__ import to_markdown

ROOT = Path(__file__).parents[1]
ROOMS = [each for each in (ROOT / "embedfarm").iterdir() if each.is_symlink()]
PYTHON_FARM = ROOT / "embedfarm" / "farm.py"  # whose tensors are made where they are asked for
MODULE_LINES_MAX = 300
FUNCTION_LINES_MAX = 60
FUNCTION_LINES_MEDIAN = 8
METHODS_MAX = 20
PARAMETERS_MAX = 12
# A docstring that begins so leans on its neighbour.
LEANING = re.compile(
    r"(As|Of|It|Its|They|Them|Their|He|Who|Whose|Whom|That|Those|These|Same|The same|Such|Also|And"
    r"|But|Or|Else|With|Without|By|For|From|To|At|On|In|Until|After|Before|When|Which|Not|No|None"
    r"|Some|Up|Another|Likewise)\b"
)
# A function that begins so does not say what it does.
NO_VERB = re.compile(
    r"(The|A|An|What|Whether|How|Where|Why|One|All|Each|Every|There|Number|Index|Key|Seconds|Bytes"
    r"|Tokens|Vectors|Texts|Chunks|Blocks|Rows|Jobs|Workers|Files|Names|Entries|Options)\b"
)
# Files that share a name are about the same thing, such as a format, or the subject of a verb.
SHARED_FILES = {
    "__init__", "__main__", "main",  # entry points
    "app", "routes",  # what there is of a door
    "jsonl", "parquet",  # read, and written
    "jobs", "keys", "outputs", "overview", "scheduler",  # the thing, and the verb or page for it
}  # fmt: skip
# Words of our own for which the field has one, and that one.
INVENTED = {
    "asker": "caller", "askers": "callers", "bell": "wake-up", "bells": "wake-ups",
    "course": "history", "desk": "interactive requests", "foretell": "forecast",
    "foretold": "forecast", "hole": "gap", "holes": "gaps", "kin": "like it", "knock": "wake-up",
    "lifeline": "parent pipe", "recipe": "settings", "rung": "woken", "suspect": "may be poison",
    "suspects": "may be poison",
}  # fmt: skip
# Keys and fields of the wire keep their names: programs of others read and write them.
WIRE_NAMES = re.compile(r'["`]bell["`]|:bell\b|\blane-bell\b|["`]recipe["`]')
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def modules() -> list[Path]:
    """Every module that ships."""
    own = (ROOT / "embedfarm").glob("*.py")
    return [*own, *(path for room in ROOMS for path in room.resolve().rglob("*.py"))]


@pytest.fixture(scope="module", autouse=True)
def parsed() -> Iterator[None]:
    """Let these tests run in one process, where each file is parsed once."""
    yield
    parse.cache_clear()


@functools.cache
def parse(path: Path) -> ast.Module:
    """The tree of a file's code."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path: Path) -> set[str]:
    """The top-level packages that a module imports, lazily or not."""
    nodes = list(ast.walk(parse(path)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return {name.split(".")[0] for name in names}


def code_lines(path: Path) -> int:
    """Lines that carry a token, minus comments and docstrings."""
    source = path.read_text()
    ignored = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {
        line
        for token in tokens
        if token.type not in ignored
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(lines - docstring_lines(parse(path)))


def docstring_lines(tree: ast.Module) -> set[int]:
    """The numbers of all lines in docstrings."""
    bodies = [
        node.body
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    strings = [
        body[0]
        for body in bodies
        if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    ]
    return {
        line
        for node in strings
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def function_lengths(path: Path) -> dict[str, int]:
    """The lines of each function from `def` to its end, without the docstring, by name."""
    lengths = {}
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            documented = ast.get_docstring(node, clean=False)
            documentation = len(documented.splitlines()) if documented else 0
            end = node.end_lineno or node.lineno
            lengths[f"{path.relative_to(ROOT)}:{node.name}"] = end - node.lineno + 1 - documentation
    return lengths


def docstrings(path: Path) -> list[tuple[str, str, bool]]:
    """Name and docstring of all that a file documents, and whether that is a function."""
    found = []
    for node in ast.walk(parse(path)):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            decorators = [ast.unparse(each) for each in getattr(node, "decorator_list", ())]
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            is_property = any("property" in each for each in decorators)
            name = f"{path.relative_to(ROOT)}:{getattr(node, 'name', '')}"
            found.append((name, text, is_function and not is_property))
    return found


def test_docstrings_stand_alone() -> None:
    """Docstrings begin with no pronoun or preposition, and those of functions with a verb."""
    shipped, others = modules(), [*ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]
    assert len(shipped) > 100
    for path in [*shipped, *(each for each in others if "node_modules" not in each.parts)]:
        for name, text, should_have_verb in docstrings(path):
            first = " ".join(text.split("\n\n")[0].split())
            assert not LEANING.match(first), f"{name}: {first}"
            assert len(first.split()) >= 3, f"{name}: {first}"
            if should_have_verb and path in shipped:
                assert not NO_VERB.match(first), f"{name}: {first}"


def test_words_are_those_of_the_field() -> None:
    """Code, messages, pages and documents use none of the words in `INVENTED`."""
    pages = [path for room in ROOMS for path in room.resolve().rglob("*") if is_page(path)]
    documents = [*ROOT.glob("*.md"), *ROOT.glob("d*/*.md"), *ROOT.glob("docs/*.rst")]
    assert len(pages) > 30
    assert len(documents) > 10
    for path in [*modules(), *pages, *documents]:
        text = WIRE_NAMES.sub("", path.read_text(encoding="utf-8"))
        words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", text)}
        found = {word: INVENTED[word] for word in sorted(words & INVENTED.keys())}
        assert not found, path.relative_to(ROOT)


def is_page(path: Path) -> bool:
    """Tell whether a file holds text of pages, or a script of the server."""
    return path.suffix in {".html", ".lua"} or path.name in {"live.js", "style.css"}


def test_a_name_means_one_thing() -> None:
    """Each class has a name of its own, and so has each file but those in `SHARED_FILES`."""
    paths = modules()
    trees = {path.relative_to(ROOT): parse(path) for path in paths}
    places: defaultdict[str, list[Path]] = defaultdict(list)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path)
    assert len(places) > 300
    assert not {name: where for name, where in places.items() if len(where) > 1}
    files = Counter(path.stem for path in paths)
    assert {name for name, count in files.items() if count > 1} == SHARED_FILES


def test_rooms_are_links() -> None:
    """Each room lies at the top of the tree, and the package has a relative link to it."""
    assert len(ROOMS) == 11
    for room in ROOMS:
        assert room.readlink() == Path("..") / room.name
        assert (ROOT / room.name / "__init__.py").is_file()


def test_no_room_is_too_large() -> None:
    """Every room has at most a quarter of the code."""
    sizes = Counter[str]()
    for path in modules():
        sizes[path.relative_to(ROOT).parts[0]] += code_lines(path)
    assert max(sizes.values()) <= sizes.total() / 4, sizes


def test_the_contract_is_light() -> None:
    """Only the workers' engines import torch, and only the web a web framework."""
    for path in modules():
        if "engines" not in path.parts and path != PYTHON_FARM:
            assert not imported(path) & {"torch", "sentence_transformers"}, path
        if path.relative_to(ROOT).parts[0] != "web":
            assert not imported(path) & {"fastapi", "starlette", "uvicorn"}, path


def test_modules_are_small() -> None:
    """A module has at most 300 code lines; above that, the file becomes a folder."""
    sizes = {str(path.relative_to(ROOT)): code_lines(path) for path in modules()}
    assert not {name: size for name, size in sizes.items() if size > MODULE_LINES_MAX}


def test_functions_are_small() -> None:
    """A function has at most 60 lines, and half of them have at most 8."""
    lengths = {name: size for path in modules() for name, size in function_lengths(path).items()}
    assert not {name: size for name, size in lengths.items() if size > FUNCTION_LINES_MAX}
    assert statistics.median(lengths.values()) <= FUNCTION_LINES_MEDIAN


def test_classes_have_few_methods() -> None:
    """A class has at most 20 public methods of its own, besides its properties."""
    for path in modules():
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ClassDef):
                methods = [
                    each.name
                    for each in node.body
                    if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
                    and not each.name.startswith("_")
                    and not any("property" in ast.unparse(mark) for mark in each.decorator_list)
                ]
                assert len(methods) <= METHODS_MAX, (path.relative_to(ROOT), node.name, methods)


def test_functions_have_few_parameters() -> None:
    """A function takes at most 12 parameters, but for a verb, whose parameters are its options."""
    verbs = {verb.place for verb in VERBS.values()}
    for path in modules():
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = sum(each.arg not in {"self", "cls"} for each in given)
                is_verb = path.parent.name == "cli" and (path.stem, node.name) in verbs
                assert count <= PARAMETERS_MAX or is_verb, (path.relative_to(ROOT), node.name)


def test_tests_do_not_sleep() -> None:
    """A test waits for a condition or a signal, with a deadline, and never just for time."""
    for path in (ROOT / "tests").rglob("*.py"):
        calls = [
            node
            for node in ast.walk(parse(path))
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"time.sleep", "sleep"}
        ]
        assert not calls, path


def test_settings_are_documented() -> None:
    """docs/settings.md is what the settings say of themselves."""
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8") == to_markdown()


def test_verbs_are_documented() -> None:
    """Every verb of the command line has help, and is in the README."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    group = get_command(app)
    assert isinstance(group, Verbs)
    assert len(group.list_commands(None)) > 5
    for name in group.list_commands(None):
        verb = group.get_command(None, name)
        assert verb is not None
        # What lists the verbs has not imported them.
        assert " ".join((verb.help or "").split()).startswith(VERBS[name].help), name
        assert verb.name == name
        assert name in readme, name


def test_make_targets_of_the_readme_exist() -> None:
    """What the README says to make can be made."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"\bmake ([a-z]+)", readme))
    assert {"demo", "test"} <= targets
    assert all(f"\n{target}:" in makefile for target in targets)


def test_documents_point_to_what_exists() -> None:
    """Every relative link of every document leads somewhere."""
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8")):
            assert (document.parent / link).exists(), (document, link)
        for path in re.findall(
            r"`((?:tests|docs|deploy|benchmarks)/[\w/.]*)`", document.read_text()
        ):
            assert (ROOT / path).exists(), (document, path)


def test_decisions_have_an_index() -> None:
    """Each decision is in the index, in order, under its title and with the one that changed it."""
    text = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
    made = re.findall(
        r"^\*\*(\d+)\. ([^*]+?)\.?\*\*(?: \(changes (\d+)\))?", text, flags=re.MULTILINE
    )
    changed = {earlier: f"changed by {number}" for number, _, earlier in made if earlier}
    wanted = [(number, title, changed.get(number, "stands")) for number, title, _ in made]
    assert [number for number, *_ in wanted] == [str(1 + place) for place in range(len(wanted))]
    assert re.findall(r"^\| (\d+) \| (.+) \| (.+) \|$", text, flags=re.MULTILINE) == wanted


def test_the_changelog_has_this_version() -> None:
    """Each version has a dated section of the changelog, newest first; the package's is one."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (.+)$", changelog, flags=re.MULTILINE)
    versions = [re.fullmatch(r"([\d.]+) - (\d{4}-\d\d-\d\d)", each) for each in sections[1:]]
    assert sections[0] == "Unreleased"
    assert all(versions), sections
    dates = [each[2] for each in versions if each]
    assert dates == sorted(dates, reverse=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] in [each[1] for each in versions if each]


LIGHT = {
    "embedfarm.cli.app": {"numpy", "pyarrow", "pydantic", "redis"},
    "embedfarm.cli.embed, embedfarm.runs.completion, embedfarm.farm": {
        "fastapi", "matplotlib", "openvino", "rq", "sentence_transformers", "torch", "uvicorn"
    },
}  # fmt: skip


@pytest.mark.parametrize("modules", LIGHT)
def test_little_is_imported(modules: str) -> None:
    """Listing the verbs needs no library of note; a run, from Python too, no models nor HTTP."""
    code = f"import sys, {modules}; print(sorted({LIGHT[modules]} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
