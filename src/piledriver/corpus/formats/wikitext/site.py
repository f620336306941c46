"""The names of a wiki's namespaces, and the prefixes of other wikis."""

from __future__ import annotations

from dataclasses import dataclass

from piledriver.corpus.text.data_table import word_set

ENGLISH_FILES = word_set("file image media")
ENGLISH_CATEGORIES = word_set("category")
# The names of pictures and categories in the larger wikis, for single pages, which have no head of a dump.
_FILES = word_set(
    """
    file image media datei bild fichier archivo imagen ficheiro arquivo imagem immagine bestand
    afbeelding plik grafika файл изображение зображення слика датотека ファイル 画像 文件 檔案 图像 파일
    그림 fil billede dosya resim tiedosto kuva fișier imagine soubor súbor fájl kép datoteka slika αρχείο
    εικόνα קובץ תמונה ملف صورة پرونده تصویر चित्र চিত্র lêer beeld fitxer imatge fitxategi dosiero berkas
    gambar پەڕگە şəkil attēls vaizdas pilt fail պատկեր ფაილი ไฟล์ படிமம்
    """
)
_CATEGORIES = word_set(
    """
    category kategorie catégorie categoría categoria kategoria категория категорія категорија カテゴリ
    分类 分類 분류 kategori luokka categorie kategória kategorija κατηγορία קטגוריה تصنيف رده श्रेणी
    বিষয়শ্রেণী kategorio kategoriija kategooria
    """
)


@dataclass(frozen=True, kw_only=True)
class Site:
    """One wiki, as the head of its dump describes it. The English names are valid in every wiki."""

    name: str = ""
    language: str = "en"
    url: str = ""
    """The part of a page's address before its title."""
    file_names: frozenset[str] = _FILES
    category_names: frozenset[str] = _CATEGORIES


# Prefixes of links between the languages of Wikipedia: such a link is navigation, not text.
LANGUAGES = word_set(
    """
    aa ab ace ady af ak als alt am ami an ang ann anp ar arc ary arz as ast atj av avk awa ay az azb ba ban
    bar bat-smg bbc bcl bdr be be-tarask be-x-old bew bg bh bi bjn blk bm bn bo bpy br bs btm bug bxr ca
    cbk-zam cdo ce ceb ch cho chr chy ckb co cr crh cs csb cu cv cy da dag de dga din diq dsb dtp dty dv dz ee
    el eml en eo es et eu ext fa fat ff fi fiu-vro fj fo fon fr frp frr fur fy ga gag gan gcr gd gl glk gn gom
    gor got gpe gsw gu guc gur guw gv ha hak haw he hi hif ho hr hsb ht hu hy hyw hz ia iba id ie ig igl ii ik
    ilo inh io is it iu ja jam jbo jv ka kaa kab kbd kbp kcg kg kge ki kj kk kl km kn knc ko koi kr krc ks ksh
    ku kus kv kw ky la lad lb lbe lez lfn lg li lij lld lmo ln lo lrc lt ltg lv lzh mad mai map-bms mdf mg mh
    mhr mi min mk ml mn mni mnw mo mos mr mrj ms mt mus mwl my myv mzn na nah nan nap nds nds-nl ne new ng nia
    nl nn no nov nqo nr nrm nso nup nv ny oc olo om or os pa pag pam pap pcd pcm pdc pfl pi pih pl pms pnb pnt
    ps pt pwn qu rm rmy rn ro roa-rup roa-tara rsk ru rue rup rw sa sah sat sc scn sco sd se sg sgs sh shi shn
    si simple sk skr sl sm smn sn so sq sr srn ss st stq su sv sw syl szl szy ta tay tcy tdd te tet tg th ti
    tig tk tl tly tn to tpi tr trv ts tt tum tw ty tyv udm ug uk ur uz ve vec vep vi vls vo vro wa war wo wuu
    xal xh xmf yi yo yue za zea zgh zh zh-classical zh-min-nan zh-yue zu
    """
)

# Prefixes of links to sister projects, which a reader does not see.
SISTERS = word_set(
    """
    b c commons d foundation incubator m mediazilla meta metawikipedia mw n phab q quality s species v voy w
    wikibooks wikidata wikimedia wikinews wikipedia wikiquote wikisource wikispecies wikiversity wikivoyage
    wikt wiktionary wmf doi arxiv imdbtitle imdbname pmid iarchive google mailarchive rfc jstor oeis bugzilla
    rev git
    """
)
