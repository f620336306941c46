"""Tell IP addresses from versions, sections and figures, by the text around them.

Precision matters more than recall: a missed address does little harm, while a manual whose sections are all replaced by
<IP> is useless. A word like "version" or "section" before the numbers, or an ending like "-rc1" after them, rejects; a
word like "host" or "ping", a scheme, a port or a mask accepts; without such context the numbers themselves decide.
"""

from __future__ import annotations

import ipaddress
import re

_LOOK_BACK = 60
# "versions 1.2.3.4, 1.2.3.5 and 1.2.3.6": the word before the first applies to all of them.
_OTHERS = re.compile(
    r"(?:v?\d+(?:\.\d+)*[)\]]?\s*(?:,|;|&|/|–|—|-|and|or|to|through|until|from)\s*(?:and|or|to)?\s*)+$"
)
_NOT_AN_ADDRESS = re.compile(
    r"(?:\b(?:v|ver|vers|versions?|releases?|rel|builds?|revisions?|rev|firmware|drivers?|kernel|sdk|api|jdk|jre|patch"
    r"|update|updated|upgrade|upgraded|edition|hotfix|package|plugin|module|library|level"
    r"|sections?|sect|sec|subsections?|chapters?|chap|ch|clauses?|articles?|art|paragraphs?|para|par|rules?|parts?"
    r"|figures?|fig|tables?|tab|appendix|appendices|annex|steps?|items?|numbers?|no|nos|nr|eq|eqs|equations?|theorems?"
    r"|lemmas?|propositions?|prop|definitions?|def|corollary|examples?|exercises?|problems?|requirements?|req|schedule"
    r"|oid|asn|isbn|doi|mib|snmp|ec|cfr|usc|see|id)"
    r"|[§¶№#])[\s.:=#(\[\"'“]{0,5}(?:from|to|is|was|of|number|no\.?|numbers)?[\s:(\"'“]{0,3}$",
    re.IGNORECASE,
)
_ADDRESS = re.compile(
    r"(?:\b(?:ips?|ipv4|ip4|addr|address|addresses|hosts?|hostname|servers?|nameservers?|dns|ping|pinging|traceroute"
    r"|gateway|router|proxy|netmask|subnet|network|inet|clients?|peer|remote|node|login|logged|connected|connecting"
    r"|connection|connect|ssh|telnet|ftp|curl|wget|whois|nslookup|dig|listen|listening|bind|resolver|x-forwarded-for)"
    r"\s*(?:is|was|to|from|at|on|in|of|via)?|://|@|=)[\s:=(\[<\"'`]{0,4}$",
    re.IGNORECASE,
)
_VERSION_ENDING = re.compile(
    r"[-_+.]?(?:rc|beta|alpha|pre|dev|snapshot|final|release|ga|sp|post|build)\.?\d*\b"
    r"|[-_.](?:jar|tar|tgz|zip|dll|exe|whl|deb|rpm|so|msi|dmg|pkg|apk|x86|amd64|noarch|el\d|fc\d+|orig|ubuntu\d*|debian)\b"
    r"|\+",
    re.IGNORECASE,
)
_ADDRESS_ENDING = re.compile(r":\d{2,5}\b|/(?:[89]|[12]\d|3[0-2])\b|\]?\)?\s*\((?:[\w-]+\.)+[a-z]{2,}\)")
# A product and its version, "Chrome/96.0.1.2"; but not "http://".
_PRODUCT = re.compile(r"[A-Za-z]/$")
_HEADING = re.compile(r"[ \t]+\w*[A-Za-z]")


def is_address(text: str, begin: int, end: int) -> bool:
    """Return whether [begin, end) of a text is a public IP address, and not a version or a section.

    >>> text = "Version 8.8.8.8 asks host 8.8.8.8 first; see 93.184.216.34, not 192.168.0.1."
    >>> [text[m.start() - 5 : m.end()] for m in re.finditer(r"[0-9.]+[0-9]", text) if is_address(text, *m.span())]
    ['host 8.8.8.8', ' see 93.184.216.34']
    """
    found = text[begin:end]
    try:
        if not ipaddress.ip_address(found).is_global:
            return False
    except ValueError:
        return False
    if ":" in found:
        # `C::` and `a::b` are code.
        return sum(map(bool, found.split(":"))) >= 3
    before = text[max(0, begin - _LOOK_BACK) : begin]
    before = before[before.rfind("\n") + 1 :]
    first_of_list = _OTHERS.sub("", before)
    if _VERSION_ENDING.match(text, end) or _PRODUCT.search(before):
        return False
    if _ADDRESS.search(first_of_list) or _ADDRESS_ENDING.match(text, end):
        return True
    groups = [int(group) for group in found.split(".")]
    # Sections and versions begin with small numbers.
    if _NOT_AN_ADDRESS.search(first_of_list):
        return min(groups[:2]) > 31
    # Small numbers at the start of a line with words after them: a heading, or an entry of a list.
    if not before.strip() and max(groups[:3]) < 32 and _HEADING.match(text, end):
        return False
    # Four numbers under 32 are a version or a section far more often than an address: one in 4,000 has them.
    return max(groups) > 31
