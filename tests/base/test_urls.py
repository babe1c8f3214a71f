"""No password in a URL is shown, however it was mistyped."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from lockstep.base.urls import has_password, without_password

WRONG = [
    "postgresql://u:s3cret@h/d",
    "postgresql://u:s3@cret@h/d",
    "postgresql://u:s3/cret@h/d",
    "postgresql://u:s3?cret@h/d",
    "postgresql:/u:s3cret@h/d",
    "postgresql:u:s3cret@h/d",
    "postgres//u:s3cret@h/d",
    "postgre://u:s3cret@h/d",
    "postgresql://u:s3cret",
    "postgresql://u:s3cret/d",
    "postgresql://h/d?password=s3cret",
    "postgresql://h/d?user=u&PassWord=s3cret",
    "postgresql://h/d?sslpassword=s3cret&host=/tmp",
    "mysql+nosuch://u:s3cret@h:notaport/d",
    "mysql://h/d?passwd=s3cret",
    " postgresql://u:s3cret@h/d",
    "jdbc:postgresql://h/d?user=x&password=s3cret",
    "u:s3cret@h/d",
    "host=h password=s3cret",
    "s3://key:s3cret@bucket",
]
RIGHT = [
    "sqlite:///search.db",
    "sqlite:////data/a b/search.db",
    "postgresql://me@db/searches",
    "postgresql+psycopg2://me@db:5432/searches?host=/tmp/x&sslmode=require",
    "postgresql://me@[::1]:5432/d?passfile=/home/me/.pgpass",
    "mysql+pymysql://me@db/d?read_default_file=/home/me/.my.cnf",
    "s3://bucket/run",
    "search.db",
    "",
]


@pytest.mark.parametrize("url", WRONG)
def test_a_password_is_found_and_not_shown(url: str) -> None:
    assert has_password(url)
    shown = without_password(url).removeprefix("s3:")
    assert not any(part in shown for part in ("s3", "cret"))


@pytest.mark.parametrize("url", RIGHT)
def test_a_url_without_one_is_shown_whole(url: str) -> None:
    assert not has_password(url)
    assert without_password(url) == url


@given(
    st.text("ab:@/?&=#% "),
    st.sampled_from(["postgresql://", "mysql:/", "", "x//"]),
    st.text("ab:@/?&=# "),
)
def test_what_stands_between_a_login_and_its_host_is_never_shown(
    before: str, scheme: str, after: str
) -> None:
    assert "SECRET" not in without_password(f"{scheme}u{before}:SECRET@{after}")


@given(st.text())
def test_any_text_can_be_shown(text: str) -> None:
    assert isinstance(without_password(text), str)
