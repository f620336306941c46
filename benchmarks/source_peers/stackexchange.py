"""What the original used for StackExchange: ElementTree over the posts, BeautifulSoup's text of each body."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree

CASES = ["stackexchange/french.meta/Posts.xml"]


def peer(content: bytes) -> str:
    from bs4 import BeautifulSoup

    questions: dict[str, dict[str, str]] = {}
    answers: dict[str, list[dict[str, str]]] = {}
    written: list[str] = []
    for _, element in ElementTree.iterparse(io.BytesIO(content)):
        post = dict(element.attrib)
        element.clear()
        if post.get("PostTypeId") == "1" and int(post.get("AnswerCount", 0)) > 0:
            questions[post["Id"]] = post
        elif post.get("PostTypeId") == "2" and post.get("ParentId") in questions:
            answers.setdefault(post["ParentId"], []).append(post)
    for number, question in questions.items():
        kept = [
            a for a in answers.get(number, []) if a["Id"] == question.get("AcceptedAnswerId") or int(a["Score"]) >= 3
        ]
        if not kept:
            continue
        kept.sort(key=lambda answer: -int(answer["Score"]))
        text = f"Q:\n\n{question['Title']}\n\n{BeautifulSoup(question['Body'], 'html.parser').get_text()}\n\n"
        for answer in kept[:3]:
            text += f"A:\n\n{BeautifulSoup(answer['Body'], 'html.parser').get_text()}\n\n"
        written.append(re.sub(r"\n{3,}", "\n\n", text))
    return "\n".join(written)
