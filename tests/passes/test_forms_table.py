"""README's table of forms is the one that the tests make."""

import pytest

from tools import forms_table


def test_the_table_in_the_readme_is_the_one_of_today(update_goldens):
    text = forms_table.README.read_text()
    if update_goldens:
        fresh = forms_table.write(text)
        if fresh != text:
            forms_table.README.write_text(fresh)
        return
    assert forms_table.written(text) == forms_table.table(), "run pytest --update-goldens"


def test_every_form_is_described():
    for row in forms_table.table().splitlines()[2:]:
        name, what, _, _, _ = (cell.strip() for cell in row.strip("|").split("|"))
        assert what, name


def test_a_readme_without_the_marks_is_an_error():
    with pytest.raises(ValueError, match="expected one"):
        forms_table.write("# kvfuse\n")


def test_nothing_but_the_table_is_written():
    before, after = "# kvfuse\n", "rest\n"
    text = f"{before}{forms_table.BEGIN}| old |\n{forms_table.END}{after}"
    assert forms_table.write(text) == text.replace("| old |\n", forms_table.table())
