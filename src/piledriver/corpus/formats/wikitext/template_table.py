"""Which templates say something to a reader, and what. All the others (boxes, navigation, notices) say nothing."""

from __future__ import annotations

import re
from collections.abc import Callable

from piledriver.corpus.formats.wikitext.calls import Call
from piledriver.corpus.formats.wikitext.marks import EQUALS, LINE_BREAK, words
from piledriver.corpus.formats.wikitext.measures import convert_to_text, height_to_text, value_to_text

Handler = Callable[[Call], str]
_MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]


def _nth(index: int) -> Handler:
    return lambda call: call.at(index)


def _last(call: Call) -> str:
    return call.given()[-1] if call.given() else ""


def _joined(separator: str) -> Handler:
    return lambda call: separator.join(call.given())


def _before(prefix: str) -> Handler:
    return lambda call: f"{prefix}{call.at(1)}" if call.at(1) else ""


def _quote(call: Call) -> str:
    text = call.at(1) or call.named.get("text", "") or call.named.get("quote", "")
    author = call.named.get("author", "") or call.named.get("sign", "") or call.at(2)
    source = call.named.get("source", "") or call.named.get("title", "")
    said = ", ".join(part for part in (author, source) if part)
    return f"\n\n{text}\n\n" + (f"— {said}\n\n" if said and text else "") if text else ""


def _items(call: Call) -> str:
    return "\n" + "\n".join(f"* {item.lstrip('* ')}" for item in call.given()) + "\n" if call.given() else ""


def _numbered(call: Call) -> str:
    return "\n" + "\n".join(f"# {item}" for item in call.given()) + "\n" if call.given() else ""


def _content(call: Call) -> str:
    # `{{plainlist|` and its like hold whole lists.
    text = call.at(1) or call.named.get("content", "") or call.named.get("list", "")
    return f"\n{text}\n" if text else ""


def _date(call: Call) -> str:
    numbers = [part for part in call.positional if part]
    if not numbers:
        return ""
    if not numbers[0].lstrip("-").isdigit():
        return numbers[0]
    year, month = numbers[0], _month(numbers[1]) if len(numbers) > 1 else ""
    if not month:
        return year
    day = numbers[2].lstrip("0") if len(numbers) > 2 and numbers[2].isdigit() else ""
    if not day:
        return f"{month} {year}"
    return f"{day} {month} {year}" if call.named.get("df", "")[:1].lower() == "y" else f"{month} {day}, {year}"


def _month(text: str) -> str:
    if text.isdigit():
        return _MONTHS[int(text) - 1] if 1 <= int(text) <= 12 else ""
    return text if text.isalpha() else ""


def _as_of(call: Call) -> str:
    alternative = call.named.get("alt", "")
    if alternative:
        return alternative
    words = "as of" if call.named.get("lc", "")[:1].lower() == "y" else "As of"
    date = [part for part in (call.at(3), _month(call.at(2)), call.at(1)) if part]
    return f"{words} {' '.join(date)}" if date else ""


def _circa(call: Call) -> str:
    return "c. " + " – c. ".join(call.given()) if call.given() else "c."


def _nihongo(call: Call) -> str:
    inside = ", ".join(part for part in (call.at(2), call.at(3)) if part)
    return f"{call.at(1)} ({inside})" if inside and call.at(1) else call.at(1) or inside


def _chinese(call: Call) -> str:
    keys = ("c", "s", "t", "p", "w", "j", "tp", "hanja", "l")
    return "; ".join(call.named[key] for key in keys if call.named.get(key)) or call.at(1)


def _pronunciation(call: Call) -> str:
    sounds = "".join(part for part in call.positional if part.lower() not in _SOUND_SWITCHES)
    return f"/{sounds}/" if sounds else ""


_SOUND_SWITCHES = words(
    """
    us uk uslang uklang us: local en lang pron audio ipa rp ga also
    """
)


def _phonetic(call: Call) -> str:
    """`{{IPA|de|ˈtaːk}}` and `{{IPA-de|ˈtaːk|lang}}` put the sounds into brackets; `{{IPA|ˈtaːk}}` does not."""
    if call.name == "ipa":
        return f"[{call.at(2)}]" if call.at(2) and _CODE.fullmatch(call.at(1)) else call.at(1)
    sounds = call.at(1)
    return sounds if not sounds or sounds[0] in "[/⟨(" else f"[{sounds}]"


def _in_language(call: Call) -> str:
    return call.at(2) if _CODE.fullmatch(call.at(1)) else call.at(1)


def _tracks(call: Call) -> str:
    """The songs of an album, in their order."""
    lines = []
    for number in range(1, 100):
        title = call.named.get(f"title{number}")
        if title is None:
            break
        length = call.named.get(f"length{number}", "")
        lines.append(f"# {title}" + (f" ({length})" if length else ""))
    return "\n" + "\n".join(lines) + "\n" if lines else ""


def _episode(call: Call) -> str:
    """A row of a list of episodes: its title, and what happens, which is prose."""
    title, summary = call.named.get("title", ""), call.named.get("shortsummary", "")
    shown = "\n\n".join(part for part in (title, summary) if part)
    return f"\n\n{shown}\n\n" if shown else ""


def _squad_player(call: Call) -> str:
    parts = (call.named.get(key, "") for key in ("no", "pos", "name", "other"))
    return "\n* " + " ".join(part for part in parts if part) + "\n" if call.named.get("name") else ""


def _paragraph(call: Call) -> str:
    return f"\n\n{call.at(1) or call.named.get('1', '')}\n\n" if call.at(1) else ""


def _event(call: Call) -> str:
    when, what = call.named.get("date", "") or call.at(1), call.named.get("event", "") or call.at(2)
    return f"\n* {when}: {what}\n" if when and what else ""


def _ship(call: Call) -> str:
    if call.name == "ship":
        return " ".join(part for part in (call.at(1), call.at(2)) if part)
    return f"{call.name.upper()} {call.at(1)}".strip()


def _sort_name(call: Call) -> str:
    return " ".join(part for part in (call.at(1), call.at(2)) if part)


def _fraction(call: Call) -> str:
    numbers = call.given()
    if len(numbers) == 3:
        return f"{numbers[0]} {numbers[1]}/{numbers[2]}"
    return "/".join(numbers) if len(numbers) == 2 else f"1/{numbers[0]}" if numbers else ""


def _web_address(call: Call) -> str:
    return call.at(2) or call.at(1) or call.named.get("1", "")


def _script(tag: str) -> Handler:
    return lambda call: f"<{tag}>{call.at(1)}</{tag}>" if call.at(1) else ""


def _money(sign: str) -> Handler:
    return lambda call: f"{sign}{call.at(1)}" if call.at(1) else sign


def _height(call: Call) -> str:
    return height_to_text(call.named)


def _value(call: Call) -> str:
    return value_to_text(call.positional, call.named)


def _convert(call: Call) -> str:
    return convert_to_text(call.positional)


def _table(handler: Handler, names: str) -> dict[str, Handler]:
    return {name.strip(): handler for name in names.split(",")}


_CODE = re.compile(r"[a-z]{2,3}(?:-[A-Za-z]{2,8}){0,2}")

HANDLERS: dict[str, Handler] = {
    **_table(
        _nth(1),
        "nowrap,small,smaller,larger,big,nobold,noitalics,noitalic,smallcaps,sc,midsize,mvar,math,var,code,kbd,tt,samp"
        ",mono,em,strong,bold,italic,overline,underline,red link,visible anchor,vanchor,not a typo,as written,keypress"
        ",ill,interlanguage link,nohyphen,flag,flagu,flagcountry,flagdeco+,flagathlete,flagmedalist,noflag,center,align"
        ",nts,ntsh+,number table sorting,hidden text,anchored,kern,sic,typo,gcl,proper name,strikethrough,del,ins"
        ",red,green,blue,background color,fb,fbw,fb-rt,ru-rt,cr,cricon+,player,jctname,nobr,no wrap,longitem,smalldiv"
        ",stack,aligned,bigger,pslink,slink,section link,subst,unicode,script,polytonic,hebrew,arabic,okina+"
        ",ipa link,audio-ipa,respell+,char,code2,var2,mathcal,mathbf,abs,ceil,floor,norm,nwr,j,wikicite+,ym,my,ordinal"
        ",party name with color,start-date,end-date,start-date and age",
    ),
    **_table(
        _nth(2),
        "lang,color,colour,font color,font colour,colored link,sort,hs,sortdate,resize,hid,rtl-lang,fontcolor"
        ",script/hebrew,audio,pronunciation,ipa-en+,abbrlink2,font,color box text,linktext2,aligntable,hover",
    ),
    **_table(_last, "transl,transliteration,translit,rtl,bdo,align2,text-align"),
    **_table(_joined(""), "linktext,gaps,gap,chem-text,nobreak"),
    **_table(_joined(" "), "zh-full,spaces-joined,nihongo3-joined"),
    **_table(_joined(" · "), "hlist,flatlist2,hlist-comma,dot list"),
    **_table(
        _phonetic,
        "ipa,ipa-all,ipa-de,ipa-fr,ipa-es,ipa-it,ipa-ru,ipa-pl,ipa-nl,ipa-pt,ipa-sv,ipa-da,ipa-no,ipa-cs",
    ),
    **_table(_in_language, "langx,lang-x,literal,nativename,native name,native phrase"),
    **_table(_joined("-"), "respell,pronunciation respelling"),
    **_table(_joined(" "), "bibleverse,bibleref2,bibleref,sourcetext"),
    **_table(_before("√"), "radic,sqrt"),
    **_table(_tracks, "track listing,tracklist,tracklisting"),
    **_table(_episode, "episode list,episode list/sublist,episode list/sublist2"),
    **_table(_squad_player, "fs player,football squad player,fs2 player,football squad2 player"),
    **_table(_paragraph, "term,defn,glossary term,definition"),
    **_table(_event, "timeline-event"),
    **_table(lambda call: f"${call.at(1)}$" if call.at(1) else "", "tmath"),
    **_table(lambda call: f"⟨{call.at(1)}⟩" if call.at(1) else "", "angbr,angbr ipa,angle bracket"),
    **_table(lambda call: f"'{call.at(1)}'" if call.at(1) else "", "gloss"),
    **_table(lambda call: f"lit. '{call.at(1)}'" if call.at(1) else "", "lit,literal translation,literally,lit."),
    **_table(_items, "ubl,ublist,unbulleted list,bulleted list,blist,ubt,vunblist,indented plainlist,collapsible list"),
    **_table(_numbered, "ordered list,olist,numbered list"),
    **_table(_content, "plainlist,plain list,flatlist,columns-list,column list,colist,div col content,startplainlist+"),
    **_table(
        _quote,
        "quote,blockquote,cquote,rquote,quotation,centered pull quote,pull quote,poemquote,quote block"
        ",bq,poem quote,verse translation,zitat,citaat,cita",
    ),
    **_table(
        _date,
        "birth date,birth-date,birth date and age,bda,birth year and age,death date,death date and age,dda"
        ",death-date,death year and age,start date,start date and age,end date,end date and age,film date,dts,date"
        ",launch date,date table sorting,release date,opening date,datum,formatdate,birth date2,dob,birth based on age",
    ),
    **_table(_as_of, "as of,asof"),
    **_table(_circa, "circa,c.,ca.,c"),
    **_table(_before("fl. "), "floruit,fl."),
    **_table(_before("r. "), "reign,r."),
    **_table(_before("b. "), "born,b."),
    **_table(_before("d. "), "died,d."),
    **_table(_nihongo, "nihongo,nihongo2,nihongo3,nihongo krt,korean,nihongo foot"),
    **_table(_chinese, "zh,zh-cn,lang-zh,chinese"),
    **_table(_pronunciation, "ipac-en,ipac-pl,ipac-hu,ipac-ga,ipa-c,ipac-cmn,ipac-yue"),
    **_table(_ship, "ship,hms,uss,ss,rms,ms,mv,hmas,hmcs,usns,uscgc,smsship,hmnzs,ins,sms,usat,gts,hmhs,hmt,mt,ps,tss"),
    **_table(_sort_name, "sortname,sort name,sortkeyname"),
    **_table(_fraction, "frac,fraction,sfrac,tfrac,sfrac2"),
    **_table(_web_address, "url,official url,weblink"),
    **_table(lambda call: "Official website", "official website,official,official site"),
    **_table(_script("sup"), "sup,superscript,^"),
    **_table(_script("sub"), "sub,subscript,su"),
    **_table(_before("ISBN "), "isbn,isbnt"),
    **_table(_before("OCLC "), "oclc"),
    **_table(_before("ISSN "), "issn"),
    **_table(_before("doi:"), "doi"),
    **_table(_before("arXiv:"), "arxiv"),
    **_table(_before("PMID "), "pmid"),
    **_table(_before("×10^"), "e"),
    **_table(_before("10^"), "10^"),
    **_table(_before("@"), "twitter handle"),
    **_table(_money("US$"), "us$,usd,us dollar"),
    **_table(_money("$"), "$,currency-dollar"),
    **_table(_money("£"), "£,gbp,gbp sign,pound sterling"),
    **_table(_money("€"), "€,euro,eur"),
    **_table(_money("₹"), "inr,indian rupee,rupee,indianrupee"),
    **_table(_money("¥"), "¥,jpy,yen,cny,rmb,jpyconvert"),
    **_table(_money("A$"), "a$,aud"),
    **_table(_money("CA$"), "ca$,cad,c$"),
    **_table(_height, "height"),
    **_table(_value, "val,value,nummer,number"),
    **_table(_convert, "convert,cvt,konvert"),
    **_table(lambda call: call.named.get("title") or call.title, "imdb title,imdb name,allmovie title,discogs artist"),
    **_table(lambda call: call.at(1) or call.named.get("link", ""), "annotated link,annotated article link,anl"),
    **_table(lambda call: call.at(1), "abbr,tooltip,abbrlink,hover title,h:title,tooltips"),
    **_table(lambda call: call.at(1).replace("\n", LINE_BREAK), "poem,lyrics"),
    **_table(
        lambda call: "".join(f"<sub>{p}</sub>" if p.isdigit() else p for p in call.positional), "chem,chem2,chemf"
    ),
}
HANDLERS = {name: handler for name, handler in HANDLERS.items() if not name.endswith("+")}

SYMBOLS: dict[str, str] = {
    "!": "|", "=": EQUALS, "'": "'", "'s": "'s", "' \"": "' \"", "(": "{", ")": "}", "((": "{{", "))": "}}", "!!": "||",
    "ndash": "–", "endash": "–", "en dash": "–", "–": "–", "mdash": "—", "emdash": "—", "em dash": "—", "—": "—",
    "snd": " – ", "spnd": " – ", "spaced ndash": " – ", "spaced en dash": " – ", "dash": " – ", "spaced mdash": " — ",
    "snds": " – ", "mdashb": "—", "ndashb": "–",
    "nbsp": " ", "space": " ", "spaces": " ", "thinsp": " ", "pad": " ", "·": " · ", "dot": " · ",
    "middot": " · ", "bullet": " • ", "•": " • ", "ellipsis": "...", "...": "...", "times": "×", "x": "×",
    "pi": "π", "degree": "°", "deg": "°", "okina": "ʻ", "hamza": "ʾ", "ayin": "ʿ", "prime": "′", "sharp": "♯",
    "flat": "♭", "natural": "♮", "music": "", "yes": "Yes", "no": "No", "won": "Won", "nom": "Nominated", "n/a": "N/A",
    "na": "N/A", "tba": "TBA", "tbd": "TBD", "unknown": "Unknown", "partial": "Partial", "none": "None",
    "pending": "Pending", "sfrac-": "", "break": LINE_BREAK, "br": LINE_BREAK, "crlf": LINE_BREAK, "-": "\n",
    "pipe": "|", "apostrophe": "'", "asterisk": "*", "lbrace": "{", "rbrace": "}", "lbracket": "[", "rbracket": "]",
    "bracket": "[", "hash-tag": "#", "ldquo": "“", "rdquo": "”", "nsmdns": "–", "minus": "−", "plus": "+", "shy": "",
    "usa": "United States", "gbr": "Great Britain", "ger": "Germany", "fra": "France", "esp": "Spain", "ita": "Italy",
}  # fmt: skip
