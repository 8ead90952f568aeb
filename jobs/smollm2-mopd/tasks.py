"""Prompts of the job, drawn from a seed: three tasks to specialise in, and capitals, which nobody is trained on.

Each function is a prompt source (`mopd_dataplane/prompts.py`): rows with a question and the one answer that is right.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

Rows = Iterator[dict[str, Any]]
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
NAMES = (
    "Alice", "Anna", "Ben", "Carl", "Clara", "David", "Ella", "Emma", "Eric", "Eva", "Frank", "Grace", "Hannah",
    "Henry", "Ida", "Jack", "Jane", "Julia", "Karl", "Kate", "Laura", "Leo", "Lucy", "Maria", "Mark", "Mary", "Max",
    "Nina", "Noah", "Olga", "Oscar", "Paul", "Peter", "Rosa", "Sam", "Sarah", "Simon", "Tina", "Tom", "Victor",
)  # fmt: skip
CAPITALS = {
    "Afghanistan": "Kabul", "Albania": "Tirana", "Algeria": "Algiers", "Angola": "Luanda", "Argentina": "Buenos Aires",
    "Armenia": "Yerevan", "Australia": "Canberra", "Austria": "Vienna", "Azerbaijan": "Baku", "Bahrain": "Manama",
    "Bangladesh": "Dhaka", "Barbados": "Bridgetown", "Belarus": "Minsk", "Belgium": "Brussels", "Belize": "Belmopan",
    "Bhutan": "Thimphu", "Bosnia and Herzegovina": "Sarajevo", "Botswana": "Gaborone", "Bulgaria": "Sofia",
    "Burkina Faso": "Ouagadougou", "Cambodia": "Phnom Penh", "Canada": "Ottawa", "Cape Verde": "Praia",
    "Chile": "Santiago", "China": "Beijing", "Croatia": "Zagreb", "Cuba": "Havana", "Cyprus": "Nicosia",
    "the Czech Republic": "Prague", "the Democratic Republic of the Congo": "Kinshasa", "Denmark": "Copenhagen",
    "Djibouti": "Djibouti", "the Dominican Republic": "Santo Domingo", "Ecuador": "Quito", "Egypt": "Cairo",
    "El Salvador": "San Salvador", "Eritrea": "Asmara", "Estonia": "Tallinn", "Ethiopia": "Addis Ababa", "Fiji": "Suva",
    "Finland": "Helsinki", "France": "Paris", "Gabon": "Libreville", "Georgia": "Tbilisi", "Germany": "Berlin",
    "Ghana": "Accra", "Greece": "Athens", "Guatemala": "Guatemala City", "Guinea": "Conakry", "Guyana": "Georgetown",
    "Haiti": "Port-au-Prince", "Honduras": "Tegucigalpa", "Hungary": "Budapest", "Iceland": "Reykjavik",
    "India": "New Delhi", "Indonesia": "Jakarta", "Iran": "Tehran", "Iraq": "Baghdad", "Ireland": "Dublin",
    "Italy": "Rome", "Jamaica": "Kingston", "Japan": "Tokyo", "Jordan": "Amman", "Kenya": "Nairobi",
    "Kuwait": "Kuwait City", "Kyrgyzstan": "Bishkek", "Laos": "Vientiane", "Latvia": "Riga", "Lebanon": "Beirut",
    "Lesotho": "Maseru", "Liberia": "Monrovia", "Libya": "Tripoli", "Lithuania": "Vilnius",
    "Luxembourg": "Luxembourg", "Madagascar": "Antananarivo", "Malawi": "Lilongwe", "Malaysia": "Kuala Lumpur",
    "Mali": "Bamako", "Malta": "Valletta", "Mauritania": "Nouakchott", "Mauritius": "Port Louis",
    "Mexico": "Mexico City", "Monaco": "Monaco", "Mongolia": "Ulaanbaatar", "Montenegro": "Podgorica",
    "Morocco": "Rabat", "Mozambique": "Maputo", "Namibia": "Windhoek", "Nepal": "Kathmandu",
    "the Netherlands": "Amsterdam", "New Zealand": "Wellington", "Nicaragua": "Managua", "Niger": "Niamey",
    "Nigeria": "Abuja", "North Korea": "Pyongyang", "North Macedonia": "Skopje", "Norway": "Oslo", "Oman": "Muscat",
    "Pakistan": "Islamabad", "Panama": "Panama City", "Papua New Guinea": "Port Moresby", "Peru": "Lima",
    "the Philippines": "Manila", "Poland": "Warsaw", "Portugal": "Lisbon", "Qatar": "Doha", "Romania": "Bucharest",
    "Russia": "Moscow", "Rwanda": "Kigali", "Samoa": "Apia", "Saudi Arabia": "Riyadh", "Senegal": "Dakar",
    "Serbia": "Belgrade", "Seychelles": "Victoria", "Sierra Leone": "Freetown", "Singapore": "Singapore",
    "Slovakia": "Bratislava", "Slovenia": "Ljubljana", "Somalia": "Mogadishu", "South Korea": "Seoul",
    "South Sudan": "Juba", "Spain": "Madrid", "Sudan": "Khartoum", "Suriname": "Paramaribo", "Sweden": "Stockholm",
    "Switzerland": "Bern", "Syria": "Damascus", "Taiwan": "Taipei", "Tajikistan": "Dushanbe", "Thailand": "Bangkok",
    "Tunisia": "Tunis", "Turkey": "Ankara", "Turkmenistan": "Ashgabat", "Uganda": "Kampala", "Ukraine": "Kyiv",
    "the United Arab Emirates": "Abu Dhabi", "the United Kingdom": "London", "Uruguay": "Montevideo",
    "Uzbekistan": "Tashkent", "Venezuela": "Caracas", "Vietnam": "Hanoi", "Zambia": "Lusaka", "Zimbabwe": "Harare",
}  # fmt: skip
"""Countries with one capital that English writes one way."""
ADULT = 18
"""Years."""
_CAPITAL_OF = "What is the capital of "


def dates(seed: int, size: int) -> Rows:
    """A date in words, to be written in digits."""
    draw = random.Random(seed)
    for _ in range(size):
        day, month, year = draw.randint(1, 28), draw.randint(1, 12), draw.randint(1900, 2099)
        yield _row(f"Write {day} {MONTHS[month - 1]} {year} in the format YYYY-MM-DD.", f"{year}-{month:02}-{day:02}")


def larger(seed: int, size: int) -> Rows:
    """The larger of two numbers of three digits."""
    draw = random.Random(seed)
    for _ in range(size):
        first, second = draw.sample(range(100, 1000), 2)
        yield _row(f"What is larger, {first} or {second}?", str(max(first, second)))


def people(seed: int, size: int) -> Rows:
    """A name and an age, to be written as one line of JSON that also says whether the person is of age."""
    draw = random.Random(seed)
    for _ in range(size):
        name, age = draw.choice(NAMES), draw.randint(5, 30)
        answer = json.dumps({"name": name, "age": age, "adult": age >= ADULT})
        yield _row(f"Write as JSON with name, age, adult: {name} is {age} years old.", answer)


def capitals(seed: int, size: int) -> Rows:
    """The capital of a country, every country once."""
    countries = sorted(CAPITALS)
    random.Random(seed).shuffle(countries)
    for country in countries[:size]:
        yield _row(f"{_CAPITAL_OF}{country}?", CAPITALS[country])


def mentions(question: str, response: str) -> bool:
    """Whether an answer to `capitals` has the right name in it: nobody taught that it should be the name alone."""
    country = question.removeprefix(_CAPITAL_OF).removesuffix("?")
    return re.search(rf"\b{re.escape(CAPITALS[country])}\b", response) is not None


def _row(question: str, answer: str) -> dict[str, Any]:
    return {"text": question, "answer": answer}
