"""Which tests `make check` chooses for a change."""

from __future__ import annotations

import pytest

from tests.check import Selection, distances_from, import_graph, select, starts_clusters

TIMELINE = "tests/unit/router_svc/records/test_timeline.py"
SERVICE = "tests/integration/router_svc/test_service.py"
CONSOLE = "tests/unit/router_svc/api/console/test_feed.py"
FILES = [TIMELINE, SERVICE, CONSOLE, "tests/unit/kernels/test_choice.py", "tests/integration/test_openai_api.py"]


def test_the_nearest_tests_come_first_and_what_starts_clusters_is_left_out() -> None:
    distances = {"tests/a/test_far.py": 3, "tests/a/test_near.py": 1, "tests/a/test_slow.py": 1}
    distances |= {"tests/chaos/test_lost.py": 0, "tests/integration/test_openai_api.py": 0}
    seconds = {"tests/a/test_far.py": 5.0, "tests/a/test_near.py": 5.0, "tests/a/test_slow.py": 30.0}
    assert select(distances, seconds, budget_s=12.0) == Selection(
        files=("tests/a/test_near.py", "tests/a/test_far.py"), num_beyond_budget=1, num_left_out=2
    )


def test_the_nearest_test_runs_however_long_it_takes() -> None:
    selection = select({"tests/a/test_x.py": 0}, {"tests/a/test_x.py": 500.0}, budget_s=40.0)
    assert selection.files == ("tests/a/test_x.py",)
    assert str(selection).startswith("1 of 1 test files")


def test_tests_of_one_service_with_scripted_peers_start_no_cluster() -> None:
    assert [starts_clusters(file) for file in FILES] == [False, False, False, False, True]


def test_a_change_reaches_tests_through_imports_and_conftests() -> None:
    distances = distances_from(["router_svc/records/timeline.py"], import_graph(FILES), FILES)
    assert distances[TIMELINE] == 1
    assert distances[SERVICE] > 1
    assert "tests/unit/kernels/test_choice.py" not in distances


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        ("router_svc/api/console/static/phases.js", CONSOLE),
        ("kernels/cpu/src/attend.h", "tests/unit/kernels/test_choice.py"),
        (TIMELINE, TIMELINE),
    ],
)
def test_files_that_no_module_imports_have_their_tests(changed: str, reached: str) -> None:
    assert distances_from([changed], import_graph(FILES), FILES) == {reached: 0 if changed == reached else 1}


def test_a_document_that_no_test_reads_reaches_the_checks_of_documents_alone() -> None:
    files = [*FILES, "tests/arch/test_documents.py"]
    assert set(distances_from(["docs/python.md"], import_graph(files), files)) == {"tests/arch/test_documents.py"}
