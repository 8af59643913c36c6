"""Word lists for generated exercises: names, places, things, syllables."""

from __future__ import annotations

FIRST_NAMES = """
Alice Anna Ben Carl Clara Daniel David Diana Edward Ella Emma Erik Eva Felix Fiona Frank George
Grace Hannah Harry Helen Henry Hugo Ida Irene Jack James Jane Jonas Julia Karen Kevin Laura Leo
Lena Lily Linda Lucas Lucy Maria Mark Martin Mary Max Mia Michael Mila Nina Noah Nora Oliver Oscar
Paul Peter Priya Rachel Robert Rosa Ruth Sam Sara Simon Sofia Stefan Susan Tara Theo Thomas Tim Tom
Vera Victor Walter Yuki Zoe Omar Fatima Wei Ming Aisha Ivan Olga Carlos Elena Pablo Ravi Anita Kofi
Amara Bruno Chloe Dora Ethan Freya Gustav Ingrid Jorge Kate Liam Maya Nils Otto Petra Quinn Rex Rita
""".split()

LAST_NAMES = """
Adams Baker Bell Berg Brown Carter Clark Cole Cooper Davis Diaz Evans Fischer Ford Garcia Gray Green
Hall Hansen Harris Hill Hughes Jensen Johnson Jones Keller Khan King Kumar Larsen Lee Lopez Martin
Meyer Miller Moore Morgan Nguyen Novak Olsen Park Parker Patel Perez Price Reed Rossi Sato Schmidt
Scott Silva Singh Smith Stone Taylor Turner Vogel Walker Weber White Wilson Wong Wood Wright Young
""".split()

CITIES = """
Paris|London|Berlin|Rome|Madrid|Vienna|Oslo|Stockholm|Helsinki|Dublin|Lisbon|Prague|Warsaw|Athens|
Cairo|Nairobi|Lagos|Delhi|Mumbai|Tokyo|Kyoto|Seoul|Beijing|Bangkok|Sydney|Melbourne|Toronto|Boston|
Chicago|Denver|Seattle|Austin|New York|San Diego|San Jose|Lima|Bogota|Santiago|Geneva|Hamburg|
Munich|Lyon|Naples|Porto|Bergen|Leeds|Oxford|Bristol|Cape Town|Los Angeles
""".replace("\n", "").split("|")

THINGS = """
apples books boxes bottles boats bags balls bells birds bricks buttons cakes candles cards cars
chairs clocks coats coins cups dolls doors drums eggs flowers forks glasses hats horses houses jars
keys kites knives lamps letters maps nails oranges paintings pears pencils pens pictures pillows
pipes plates plums potatoes ribbons rings rocks roses shirts shoes spoons stamps stones tables
tickets tools towels toys trees umbrellas watches windows
""".split()

FOODS = """
bread|butter|cheese|rice|soup|pasta|pizza|salad|fish|chicken|honey|milk|tea|coffee|chocolate|
apple pie|pancakes|tomatoes|carrots|onions|beans|noodles|ice cream|strawberries|bananas|lemons|
cherries|grapes|mushrooms|yogurt|sugar|salt|olive oil|sandwiches
""".replace("\n", "").split("|")

ANIMALS = """
dog cat horse rabbit fox bear wolf owl parrot mouse goat duck hen turtle frog hamster pony lion
tiger crow swan hedgehog deer sheep
""".split()

COLORS = "red blue green yellow black white brown orange purple pink grey silver golden".split()

JOBS = """
teacher doctor baker farmer nurse pilot writer painter driver lawyer gardener singer carpenter
engineer cook clerk sailor tailor librarian plumber photographer mechanic
""".split()

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()

MONTHS = """
January February March April May June July August September October November December
""".split()

ORDINALS = ["first", "second", "third", "fourth", "fifth", "sixth"]

COUNTS = {1: "word", 2: "two words", 3: "three words", 4: "four words", 5: "five words"}

STORY_PLACES = """
the forest|the river|the old mill|a dark cave|the sea|the garden|a high hill|the market|the castle|
the village|the harbour|the mountains|the lake|an empty house
""".replace("\n", "").split("|")

STORY_THINGS = """
a golden key|an old map|a small box|a broken clock|a letter|a red lamp|a silver ring|a strange book|
a wooden boat|a blue stone|a little bell|a torn coat
""".replace("\n", "").split("|")

# Parts of invented names: an onset and a rhyme, then one or two more rhymes.
ONSETS = "b br c ch d dr f fl g gr h j k kl l m n p pr q r s sk st t tr v w z".split()
RHYMES = "a al an ar e el en er i il in ir o ol on or u ul un ur ai ou".split()
RHYMES_2 = """
ba bor da dek fin ga go ka kin la len li lo ma mir mo na nar ne ra rik ro sa sen ta ti tor va vin
vo wen xa za zor
""".split()
