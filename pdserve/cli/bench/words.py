"""Common English words, most of them one token in any vocabulary: what made-up prompts consist of."""

from __future__ import annotations

_TEXT = """
able about above across act add after again against age ago air all almost along already also although always
among animal another answer any appear apple area arm army around arrive art ask attack aunt autumn away baby back
bad bag ball bank base basket bath bean bear beat beautiful because become bed before began begin behind believe
bell below best better between big bird black block blood blow blue board boat body bone book born both bottom box
boy branch bread break bridge bright bring broad brother brown build burn business busy but buy call came camp can
captain car card care carry case cat catch cause cell center century certain chair chance change chart check chief
child choose church circle city claim class clean clear climb clock close cloth cloud coast coat cold collect color
column come common company compare complete contain control cook cool copy corn corner cost cotton could count
country course cover cow create crop cross crowd cry current cut dance dark daughter day dead deal dear death
decide deep degree design desk did different dinner direct discuss distant divide doctor does dog door double down
draw dream dress drink drive drop dry during dust each ear early earth east easy eat edge effect egg eight either
electric else end enemy energy engine enough enter equal even evening event ever every exact example excite
exercise expect explain eye face fact fair fall family famous far farm fast fat father favor fear feed feel feet
fell felt field fight figure fill final find fine finger finish fire first fish fit five flat floor flow flower fly
follow food foot for force forest form forward found four free fresh friend from front fruit full fun game garden
gas gather gave general gentle get girl give glad glass gold gone good got govern grand grass gray great green grew
ground group grow guess guide had hair half hand happen happy hard has hat have head hear heart heat heavy held help
her here high hill him his history hit hold hole home hope horse hot hotel hour house how huge human hundred hunt
hurry ice idea imagine inch include increase industry insect inside interest iron island job join joy judge jump
just keep key kill kind king knew know lady lake land language large last late laugh law lay lead learn least leave
led left leg length less letter level library lie life lift light like line list listen little live local long look
lost lot loud love low machine made magnet mail main major make man many map mark market mass master match material
matter may mean measure meat meet melody men metal method middle might mile milk million mind mine minute miss mix
modern moment money month moon more morning most mother motion mount mountain mouth move much music must name
narrow nation nature near neck need neighbor never new next night nine noise noon north nose note nothing notice
now number object observe ocean off offer office often oil old once one only open operate opposite orange order
original other our out over own oxygen page paint pair paper parent part party pass past path pattern pay people
perhaps period person phrase pick picture piece place plain plan plane planet plant play please plural point pool
poor populate port pose position possible pound power practice prepare present press pretty print problem process
produce product proper protect prove provide pull push put question quick quiet quite race radio rail rain raise
ran range rather reach read ready real reason receive record red region remember repeat reply report represent
require rest result rich ride right ring rise river road rock roll room root rope rose round row rub rule run safe
said sail salt same sand save say scale school science score sea search season seat second section see seed seem
select self sell send sense sentence separate serve set settle seven several shape share sharp she sheet ship shoe
shop shore short should shoulder shout show side sight sign silent silver similar simple since sing single sister
sit six size skill skin sky sleep slip slow small smell smile snow soft soil soldier solution solve some son song
soon sound south space speak special speech speed spell spend spoke spot spread spring square stand star start state
station stay steam steel step stick still stone stop store story straight strange stream street stretch string
strong student study subject success sudden sugar suggest suit summer sun supply support sure surface surprise swim
symbol system table tail take talk tall teach team tell temperature ten term test than thank that the their them
then there these they thick thin thing think third this those though thought thousand three through throw tie time
tiny tire together told tone tool top total touch toward town track trade train travel tree triangle trip trouble
truck true try tube turn twenty two type under unit until usual valley value vary verb very village visit voice
vowel wait walk wall want war warm wash watch water wave way wear weather week weight well went were west what wheel
when where whether which while white who whole whose why wide wife wild will win wind window wing winter wire wish
with woman wonder wood word work world would write written wrong yard year yellow yes yet young
"""
WORDS: tuple[str, ...] = tuple(_TEXT.split())
