"""The page of the API's documentation, made of `/openapi.json`, without any script."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from fastapi import APIRouter, Request, Response

from embedfarm.web.http.rendering import render

# What stands for a field or parameter in an example; others have a value of their type.
SAMPLES: Final[Mapping[str, Any]] = {
    "texts": ["one text", "another"],
    "inputs": ["one text", "another"],
    "input": ["one text", "another"],
    "query": "a question",
    "source": "/data/corpus.parquet",
    "id": "a",
    "text": "one text",
    "active": ["defer", "priority", "fair"],
    "endpoint": "/v1/embeddings",
    "completion_window": "24h",
    "input_file_id": "file-ID",
    "file": "@corpus.jsonl",
    "purpose": "batch",
    "start": 0,
}
MEDIA: Final = ("application/json", "multipart/form-data")  # of examples, the first of these
UNTYPED: Final = "any"
RULES: Final = {
    "minimum": "at least {}", "maximum": "at most {}", "exclusiveMaximum": "below {}",
    "multipleOf": "a multiple of {}", "minLength": "at least {} characters",
    "maxLength": "at most {} characters", "minItems": "at least {} items",
    "maxItems": "at most {} items",
}  # fmt: skip

router: Final = APIRouter(include_in_schema=False)


class Value(NamedTuple):
    """A parameter, or a field of a body, as the page shows it.

    Attributes:
        name: Its name.
        place: "path", "query", "header" or "body".
        kind: Its type in words, with what it may be at most.
        required: Whether it must be given.
        default: Its default as JSON, "" if there is none.
        about: What it says.
    """

    name: str
    place: str
    kind: str
    required: bool
    default: str
    about: str


class BodyForm(NamedTuple):
    """A form that a body may have: its media types, what it is, and its fields."""

    media: str
    about: str
    fields: list[Value]


class Operation(NamedTuple):
    """A method of a path as the page shows it, with an example in each of three languages."""

    name: str
    method: str
    path: str
    about: str
    parameters: list[Value]
    bodies: list[BodyForm]
    answers: list[tuple[str, str]]
    examples: dict[str, str]


class Reference:
    """Reads operations out of an OpenAPI document."""

    def __init__(self, document: Mapping[str, Any], url: str, model: str) -> None:
        self._schemas = document.get("components", {}).get("schemas", {})
        self._document = document
        self._url = url
        self._samples = {**SAMPLES, "model": model}

    def sections(self) -> dict[str, list[Operation]]:
        """Return the operations by tag, in the order of the document."""
        found: dict[str, list[Operation]] = {}
        for path, methods in self._document["paths"].items():
            for method, facts in methods.items():
                tag = next(iter(facts.get("tags", [])), "others")
                found.setdefault(tag, []).append(self._operation(path, method.upper(), facts))
        return found

    def _operation(self, path: str, method: str, facts: Mapping[str, Any]) -> Operation:
        parameters = [
            self._value(each["name"], each["in"], each["schema"], each.get("required", False))
            for each in facts.get("parameters", [])
        ]
        content = facts.get("requestBody", {}).get("content", {})
        keyed = {} not in facts.get("security", [{}])
        media = next((each for each in MEDIA if each in content), next(iter(content), ""))
        call = ExampleCall(self._url, method, path, media, self._sample_body(content, media), keyed)
        return Operation(
            facts["operationId"],
            method,
            path,
            facts.get("description", ""),
            parameters,
            list(self._bodies(content)),
            [(status, each.get("description", "")) for status, each in facts["responses"].items()],
            call.examples(),
        )

    def _bodies(self, content: Mapping[str, Any]) -> Iterator[BodyForm]:
        """Yield each form that a body may have; media types with the same one are together."""
        forms: dict[str, list[str]] = {}
        for media, each in content.items():
            for schema in each["schema"].get("oneOf", [each["schema"]]):
                forms.setdefault(json.dumps(schema), []).append(media)
        for text, types in forms.items():
            schema = self._resolve(json.loads(text))
            needed = schema.get("required", [])
            fields = [
                self._value(name, "body", field, name in needed)
                for name, field in schema.get("properties", {}).items()
            ]
            fields.sort(key=lambda each: not each.required)
            yield BodyForm(", ".join(types), schema.get("description", ""), fields)

    def _value(self, name: str, place: str, schema: Any, required: bool) -> Value:  # noqa: ANN401, FBT001 # JSON, a fact
        default = json.dumps(schema["default"]) if schema.get("default") not in {None, ""} else ""
        about = schema.get("description", "")
        return Value(name, place, self._kind(schema), required, default, about)

    def _resolve(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        name = schema.get("$ref", "").rpartition("/")[2]
        found: Mapping[str, Any] = self._schemas[name] if name else schema
        return found

    def _kind(self, schema: Mapping[str, Any]) -> str:
        """Describe the type of a schema in words."""
        schema = self._resolve(schema)
        either = [*schema.get("anyOf", []), *schema.get("oneOf", [])]
        if either:
            kinds = [self._kind(each) for each in either if each.get("type") != "null"]
            return ", or ".join(dict.fromkeys(kinds))
        if "const" in schema or "enum" in schema:
            words = schema.get("enum", [schema.get("const")])
            return " | ".join(str(each) if each != "" else '""' for each in words)
        kind = schema.get("type", UNTYPED)
        if kind == "array":
            kind = f"list of {self._kind(schema.get('items', {}))}"
        elif kind == "object" and "properties" in schema:
            kind = f"object of {', '.join(schema['properties'])}"
        rules = [
            words.format(f"{schema[rule]:,.0f}")
            for rule, words in RULES.items()
            if schema.get(rule, 0) > (rule == "multipleOf")
        ]
        return ", ".join([kind, *rules])

    def _sample_body(self, content: Mapping[str, Any], media: str) -> Any:  # noqa: ANN401 # JSON
        """Return a body that shows what must be given, None where there is none."""
        if not media:
            return None
        schema = content[media]["schema"]
        schema = self._resolve(schema.get("oneOf", [schema])[0])
        needed = schema.get("required") or list(schema.get("properties", {}))[:1]
        return {name: self._sample(name, schema["properties"][name]) for name in needed}

    def _sample(self, name: str, schema: Mapping[str, Any]) -> Any:  # noqa: ANN401 # JSON
        if name in self._samples:
            return self._samples[name]
        schema = self._resolve(schema)
        words = schema.get("enum", [schema.get("const")])
        return words[0] if words[0] is not None else max(1, schema.get("minimum", 1))


class ExampleCall(NamedTuple):
    """A request of which an example is made."""

    url: str
    method: str
    path: str
    media: str
    body: Any
    keyed: bool

    def examples(self) -> dict[str, str]:
        """Return the request in each language."""
        return {"curl": self._curl(), "Python": self._python(), "Node": self._node()}

    @property
    def _place(self) -> str:
        return self.url + re.sub(r"{(\w+)}", lambda name: name[1].upper(), self.path)

    @property
    def _is_form(self) -> bool:
        return self.media == "multipart/form-data"

    def _curl(self) -> str:
        lines = [f"curl {shlex.quote(self._place)}"]
        if self.method not in {"GET", "POST"} or (self.method == "POST" and self.body is None):
            lines[0] += f" -X {self.method}"
        if self.keyed:
            lines.append('-H "Authorization: Bearer $KEY"')
        if self._is_form:
            lines += [f"-F {name}={value}" for name, value in self.body.items()]
        elif self.body is not None:
            lines += [
                f'-H "Content-Type: {self.media}"',
                f"-d {shlex.quote(json.dumps(self.body))}",
            ]
        return " \\\n  ".join(lines)

    def _python(self) -> str:
        words = [f'"{self._place}"']
        if self.keyed:
            words.append('headers={"Authorization": f"Bearer {os.environ[\'KEY\']}"}')
        if self._is_form:
            data = {name: value for name, value in self.body.items() if name != "file"}
            words += ['files={"file": open("corpus.jsonl", "rb")}', f"data={data!r}"]
        elif self.body is not None:
            words.append(f"json={self.body!r}")
        imports = ["import os", ""] if self.keyed else []
        call = f'answer = httpx.request("{self.method}", {", ".join(words)})'
        return "\n".join(
            [*imports, "import httpx", "", call, "print(answer.raise_for_status().text)"]
        )

    def _node(self) -> str:
        options = [f'method: "{self.method}"']
        headers = ["Authorization: `Bearer ${process.env.KEY}`"] if self.keyed else []
        before: list[str] = []
        if self._is_form:
            before = ["const form = new FormData();"]
            before += [
                'form.append("file", await fs.openAsBlob("corpus.jsonl"), "corpus.jsonl");'
                if name == "file"
                else f"form.append({json.dumps(name)}, {json.dumps(value)});"
                for name, value in self.body.items()
            ]
            before = ['import fs from "node:fs";', "", *before]
            options.append("body: form")
        elif self.body is not None:
            headers.append(f'"Content-Type": "{self.media}"')
            options.append(f"body: JSON.stringify({json.dumps(self.body)})")
        if headers:
            options.insert(1, f"headers: {{ {', '.join(headers)} }}")
        inside = ",\n  ".join(options)
        call = f'const answer = await fetch("{self._place}", {{\n  {inside},\n}});'
        return "\n".join([*before, call, "console.log(await answer.text());"])


@router.get("/docs")
def show_docs(request: Request) -> Response:
    """Show what can be asked of this farm by HTTP, with examples to copy."""
    services = request.app.state.services
    url = str(request.base_url).rstrip("/")
    model = next(iter(services.settings.models), "")
    sections = Reference(request.app.openapi(), url, model).sections()
    return render(request, "docs.html", {"sections": sections, "url": url})
