"""Tests of the form on a job's page that raises the limit at which the job has paused itself."""

import pytest
import redis
from fastapi.testclient import TestClient

from embedfarm.contract.jobs import Job
from embedfarm.web.auth.keys import make_key
from tests.contract.test_brakes import limited, work
from tests.support import LiveServer
from tests.web.conftest import client_of

BROWSER = {"accept": "text/html"}


@pytest.fixture
def job(client: redis.Redis) -> Job:
    """Return a job that has paused itself at its device-hours; it may still cost more."""
    job = limited(client, max_hours=1, max_cost=20)
    assert work(job, 5400, 12.5) == "paused"
    return job


def test_the_page_says_which_limit_and_raises_it(web: TestClient, job: Job) -> None:
    """The page says what was reached and what was taken, and its form lets the job go on."""
    page = web.get("/jobs/little", headers=BROWSER).text
    assert "it has taken as much as it may: max_hours 1" in page
    assert "It has taken 1 h 30 min of devices&#39; time, cost 12.50" in page
    assert "Raise and go on" in page
    assert 'name="max_cost"' in page
    assert 'href="/jobs/little/resume"' not in page
    for hours, state in (("1.2", "paused"), ("2", "open")):
        answer = web.post("/jobs/little/limits", data={"max_hours": hours}, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, "/jobs/little")
        assert job.status().state == state
    assert (job.status().max_hours, job.status().max_cost) == (2, 20)
    assert "/limits" not in web.get("/jobs/little", headers=BROWSER).text


def test_who_paused_it_resumes_it(web: TestClient, job: Job) -> None:
    """A job that somebody has paused as well stays paused when it may take more."""
    job.pause()
    page = web.get("/jobs/little", headers=BROWSER).text
    assert "can be resumed when it may take more" in page
    web.post("/jobs/little/limits", data={"max_hours": "0"})
    assert job.status().state == "paused"
    assert 'href="/jobs/little/resume"' in web.get("/jobs/little", headers=BROWSER).text


@pytest.mark.parametrize(
    "form", [{}, {"max_hours": "-1"}, {"max_hours": "nan"}, {"max_cost": "1e99"}, {"max_hours": ""}]
)
def test_what_is_no_limit_is_refused(web: TestClient, job: Job, form: dict[str, str]) -> None:
    """A form with no limit, or with one that no job can have, changes nothing."""
    answer = web.post("/jobs/little/limits", data=form, headers=BROWSER)
    assert answer.status_code == 422
    assert job.status().state == "paused"


def test_a_key_to_read_has_no_form(server: LiveServer, job: Job) -> None:
    """A person who may only read sees which limit was reached, and cannot raise it."""
    secret, key = make_key("ann", ["read"])
    with client_of(server, [key]) as web:
        web.headers |= {"authorization": f"Bearer {secret}"}
        page = web.get("/jobs/little", headers=BROWSER).text
        assert "max_hours 1. It goes on when that is raised" in page
        assert "/limits" not in page
        assert web.post("/jobs/little/limits", data={"max_hours": "9"}).status_code == 403
    assert job.status().state == "paused"
