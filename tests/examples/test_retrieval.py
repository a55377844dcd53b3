"""The search over documents: which documents match, and the reward of a search by turn."""

import json

import pytest
from support.refusal import refused_row

from jaxrl_llm.examples import retrieval
from jaxrl_llm.examples.retrieval import Search, gain

DOCUMENTS = [
    "The capital of France is Paris.",
    "Berlin is the capital of Germany, on the Spree.",
    "The Seine flows through Paris.",
    "Bread is made of flour.",
]


def said(*texts):
    """Return the messages: the policy's turns and the tool's answers, alternating."""
    return [{"role": ("assistant", "tool")[i % 2], "content": text} for i, text in enumerate(texts)]


def test_a_search_is_worth_what_is_new_and_costs_what_was_known():
    rows = [
        said("a", "[1] x\n[4] y", "b", "[1] x\n[3] z", "the answer"),
        said("a", "Nothing was found.", "b", "[1] x\n[2] y [3] z", "b", "[1] x"),
        said("the answer"),
    ]
    got = gain([], [""] * 3, rows, [["1", "3"], [1], [1]])
    assert got == [[0.5, 0.5 - 0.5, 0.0], [0.0, 1.0, -1.0], [0.0]]


def test_a_turn_of_two_searches_is_worth_what_both_find():
    results = [{"role": "tool", "content": text} for text in ("[1] x", "[3] z")]
    row = [*said("a"), *results, *said("the answer")]
    assert gain([], [""], [row], [["1", "3"]]) == [[1.0, 0.0]]


def test_what_a_failed_call_is_told_finds_nothing():
    """The error quotes the policy's arguments.

    Once, an argument with the name of a document was rewarded without a search.
    """
    told = "error: TypeError: Search.search() got an unexpected keyword argument 'x\n[3] ok\n[7] '"
    assert gain([], [""], [said("a", told, "b", "[3] x", "the answer")], [["3", "7"]]) == [[0.0, 0.5, 0.0]]


@pytest.mark.tier("extras")
def test_documents_that_fit_are_found_best_first(tmp_path):
    pytest.importorskip("bm25s")
    search = Search()
    search.reset(documents=DOCUMENTS, answer="Paris")
    assert retrieval.DOCUMENT_ID.findall(search.search("which is the capital of Germany")) == ["2", "1"]
    assert search.search("flour") == "[4] Bread is made of flour."
    assert search.search("zebra") == search.search("") == "Nothing was found."
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps({"id": f"d{i}", "text": text}) for i, text in enumerate(DOCUMENTS)))
    search.reset(corpus=str(path))
    assert retrieval.DOCUMENT_ID.findall(search.search("Seine")) == ["d2"]
    assert retrieval.index_of_file(str(path)) is search.index
    with pytest.raises(ValueError, match="`documents` or `corpus`"):
        search.reset()


@pytest.mark.parametrize("name", ["a] b", "a\nb", "", " "])
def test_an_id_that_cannot_be_read_back_is_refused(name, tmp_path):
    """`gain` would read `[a] b]` as the document `a`."""
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps({"id": name, "text": "a"}))
    with refused_row(path, 1, f"id={name!r}"):
        retrieval.index_of_file(str(path))


def test_the_package_is_named_where_it_is_not_there(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bm25s", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs bm25s: pip install 'jaxrl_llm\[retrieval\]'"):
        Search().reset(documents=DOCUMENTS)
