"""What a browser would send of a form that nobody has touched."""

from html.parser import HTMLParser


class _Form(HTMLParser):
    """Collects the fields of the form with an action, with the values that they have at first."""

    def __init__(self, action: str) -> None:
        super().__init__()
        self.fields: dict[str, str] = {}
        self.boxes: set[str] = set()
        self._action = action
        self._inside = False
        self._select = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take in a field, or an option of one."""
        said = {name: value or "" for name, value in attrs}
        if tag == "form":
            self._inside = said.get("action") == self._action
        if not self._inside:
            return
        if tag == "select":
            self._select = said["name"]
        elif tag == "option" and (self._select not in self.fields or "selected" in said):
            self.fields[self._select] = said["value"]
        elif said.get("type") == "checkbox":
            self.boxes.add(said["name"])
        elif tag in {"input", "textarea"} and said.get("type") != "file":
            self.fields[said["name"]] = said.get("value", "")


def fields_of(page: str, action: str) -> tuple[dict[str, str], set[str]]:
    """Return the fields of the form with an action, by name, and the names of its check boxes."""
    form = _Form(action)
    form.feed(page)
    return form.fields, form.boxes
