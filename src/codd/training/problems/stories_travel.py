"""Stories of vehicles, trips, and work that is done at a rate."""

from codd.training.problems.stories_trade import MONEY, MONEY_ASKS
from codd.training.problems.story import Story, event, opening, story
from codd.training.problems.world import PERSON_FACTS, PLACE_FACTS

BUS = story(
    "bus_ride",
    [
        opening("riders", "start", "A {vehicle} leaves the station with {n} passengers. | There are {n} passengers on "
                "a {vehicle}.", low=9, high=90),
        opening("riders", "groups", "A train has {k} cars with {m} passengers in each car. | A {vehicle} picks up {k} "
                "groups of {m} passengers at the station. Nobody else is on board.", "There are {e} passengers. | That "
                "makes {e} passengers.", low=4, high=45),
    ],
    [
        event("riders", "sub", "At the next stop, {n} passengers get off. | {n} people get off at the market.", "Then "
              "{e} passengers are on board. | That leaves {e} passengers."),
        event("riders", "add", "{then}{n} people get on. | At the school stop, {n} people get on.", "Now there are {e} "
              "passengers. | With the new ones, {e} passengers are on board.", high=60, limit=500),
        event("riders", "add groups", "{then}{k} families of {m} people get on. | At each of the following {k} stops, "
              "{m} people get on and nobody gets off.", "{d} people get on.\nThen {e} passengers are on board. | That "
              "is {d} people.\nNow there are {e} passengers.", high=9, limit=500),
        event("riders", "cut", "At the city hall, {part} of the passengers who are on board get off. | {part} of the "
              "passengers now on board get off at the airport.", "{d} passengers get off.\n{e} passengers stay on "
              "board. | That is {d} passengers.\nSo {e} passengers are left."),
        event("riders", "mul", "A collector then sells a ticket for ${k} to everyone on board. | Every passenger now "
              "on board pays ${k}.", "They pay {e} dollars. | The tickets bring in {e} dollars.", to="fares"),
        event("riders", "div", "At the last stop all the passengers on board get off and take taxis, {k} to a taxi. | "
              "At the end everyone on board changes to taxis, with {k} people in each taxi.", "They fill {e} taxis. | "
              "That takes {e} taxis.", to="taxis"),
        event("fares", "sub", "The fuel for the ride costs ${n}. | ${n} of this money is paid to the driver.", "Then "
              "{e} dollars are left. | That leaves {e} dollars."),
    ],
    {
        "riders": "How many passengers are on board now? | How many passengers are on board in the end?",
        "fares": "How much ticket money, in dollars, is there at the end? | How much of the ticket money, in dollars, "
        "is there in the end?",
        "taxis": "How many taxis do they need? | How many taxis are filled?",
    },
    (
        ("The driver has worked for the company for {n} years.", 3, 40),
        ("The ride takes {n} minutes in all.", 13, 180),
        ("It is {n} degrees outside that day.", 11, 95),
        ("The line has the number {n}.", 3, 150),
    ),
    vehicle="bus,tram,subway train,train,city bus",
)  # fmt: skip

PARKING = story(
    "parking_lot",
    [
        opening("cars", "groups", "A parking lot has {k} rows, and {m} cars are parked in each row. | Cars are parked "
                "in {k} rows of {m} cars at a stadium.", "There are {e} cars. | That makes {e} cars.", low=4, high=60),
        opening("cars", "start", "At noon, {n} cars are parked in a parking garage. | There are {n} cars in a parking "
                "lot.", low=15, high=500),
    ],
    [
        event("cars", "add", "{then}{n} more cars drive in. | In the next hour {n} more cars arrive.", "Now {e} cars "
              "are parked there. | The number grows to {e} cars.", high=150),
        event("cars", "sub", "{then}{n} cars leave. | After a concert, {n} of the cars drive off.", "Then {e} cars are "
              "left. | {e} cars stay."),
        event("cars", "cut", "{then}{part} of the cars parked there leave. | When the shops close, {part} of the cars "
              "that are there drive away.", "{d} cars leave.\nSo {e} cars are left. | That is {d} cars.\n{e} cars "
              "remain."),
        event("cars", "sub groups", "For the next {k} hours, {m} cars leave every hour and none arrive. | {then}{m} "
              "cars an hour leave for {k} hours.", "{d} cars leave.\nThen {e} cars are there. | That is {d} cars.\n{e} "
              "cars are left.", high=20),
        event("cars", "mul", "Each driver of a car that is parked there now pays ${k}. | Every car that is there now "
              "pays a fee of ${k}.", "The fees are {e} dollars. | They pay {e} dollars.", to="fees"),
        event("cars", "reach", "The place has room for {n} cars in all. | It is full when {n} cars are parked there.",
              "There is room for {e} more cars. | {e} more cars fit in.", to="room"),
        event("cars", "div", "The cars that are there now stand on {k} floors, equally many on each floor. | All the "
              "cars that are there now are moved to {k} floors, the same number on each.", "Each floor has {e} cars. | "
              "That is {e} cars on one floor.", to="floor"),
        event("fees", "div", "The money is shared equally by {k} owners. | {k} sisters own the place and share this "
              "money equally.", "Each gets {e} dollars. | One share is {e} dollars.", to="owner"),
    ],
    {
        "cars": "How many cars are parked there now? | How many cars are there at the end?",
        "fees": "How many dollars is that in all? | How much money, in dollars, is paid in total?",
        "room": "How many more cars can park there? | How many free spaces are there?",
        "floor": "How many cars are on each floor?",
        "owner": "How many dollars does each owner get?",
    },
    (
        ("A sign says that cars must drive slower than {n} miles per hour.", 4, 30),
        ("The place is {n} years old.", 3, 60),
        ("There are {n} trees next to it.", 4, 70),
        ("A guard walks around it every {n} minutes.", 13, 90),
    ),
)  # fmt: skip

ROAD_TRIP = story(
    "road_trip",
    [
        opening("driven", "groups", "{name} drives for {k} hours at {m} miles per hour. | {name} starts a trip and "
                "drives {k} hours at a speed of {m} miles per hour.", "{name} drives {e} miles. | The distance is {e} "
                "miles.", low=25, high=70),
        opening("driven", "start", "{name} drives {n} miles on the first day of a trip. | On Friday {name} goes on a "
                "trip and drives {n} miles.", low=40, high=400),
    ],
    [
        event("driven", "add groups", "{then}{who} drives {k} more hours, now at {m} miles per hour. | {who} goes on "
              "for {k} hours at {m} miles per hour.", "This part is {d} miles.\nSo far that is {e} miles. | That adds "
              "{d} miles.\nIn all {name} has gone {e} miles.", low=15, high=70),
        event("driven", "add", "{then}{who} drives another {n} miles. | After a break {who} goes {n} miles farther.",
              "Then {name} has gone {e} miles. | The distance grows to {e} miles.", high=250),
        event("driven", "reach", "The whole trip is {n} miles long. | It is {n} miles from {his} home to the place "
              "where {he} is going.", "{name} still has {e} miles to go. | {e} miles are left.", to="left"),
        event("left", "div", "{who} wants to go the rest in {k} hours at a steady speed. | For the miles that are "
              "left, {who} takes exactly {k} hours.", "{name} goes {e} miles per hour. | The speed is {e} miles per "
              "hour.", to="speed"),
        event("left", "sub", "{then}{who} goes {n} of the miles that are left. | A friend takes {him} {n} miles closer "
              "along the same road.", "Then {e} miles are left. | That leaves {e} miles."),
        event("left", "cut", "{then}{who} goes {part} of the distance that is left. | After lunch, {who} covers {part} "
              "of the miles still ahead.", "That is {d} miles.\n{e} miles are still left. | {name} covers {d} "
              "miles.\nThen {e} miles are left."),
        event("driven", "div", "{his} car needs a gallon of gas for every {k} miles of this distance. | {who} uses up "
              "one gallon of gas for every {k} of these miles.", "{name} uses {e} gallons. | That takes {e} gallons of "
              "gas.", to="gas", low=6),
        event("gas", "mul", "Gas costs ${k} a gallon. | {who} pays ${k} for every gallon.", "The gas costs {e} "
              "dollars. | {name} pays {e} dollars.", to="cost"),
        event("cost", "add", "{who} also pays ${n} for a hotel on the way. | A toll road costs another ${n}.", "In all "
              "{name} pays {e} dollars. | The total cost is {e} dollars.", high=150),
    ],
    {
        "driven": "How many miles does {name} go in all? | How many miles long is the whole way so far?",
        "left": "How many miles are left? | How many miles does {name} still have to go?",
        "speed": "At how many miles per hour does {name} go? | What is {name}'s speed on this last part, in miles per "
        "hour?",
        "gas": "How many gallons of gas does {name} use?",
        "cost": "How many dollars does {name} pay in all? | How much does {name} spend, in dollars?",
    },
    (
        *PERSON_FACTS,
        ("{name}'s suitcase weighs {n} pounds.", 13, 60),
        ("{name} listens to {n} songs on the way.", 4, 80),
    ),
)  # fmt: skip

HIKING = story(
    "camping_and_hiking",
    [
        opening("food", "groups", "{k} campers each bring {m} ounces of trail mix to a camp. | A group of {k} hikers "
                "takes {m} ounces of trail mix for each person.", "They have {e} ounces. | In all that is {e} ounces.",
                low=8, high=80),
        opening("food", "start", "A group of hikers takes {n} ounces of trail mix. | {name} and {his} friends bring "
                "{n} ounces of trail mix to a camp.", low=30, high=500),
    ],
    [
        event("food", "sub", "One evening, {n} ounces are eaten. | A raccoon steals {n} ounces.", "Then {e} ounces are "
              "left. | That leaves {e} ounces.", high=150),
        event("food", "add groups", "{then}they buy {k} bags of {m} ounces in a village. | {k} friends join them and "
              "bring {m} ounces each.", "They get {d} ounces more.\nNow they have {e} ounces. | That is {d} "
              "ounces.\nIn all there are {e} ounces.", high=25),
        event("food", "sub groups", "In the next {k} days, {m} ounces are eaten every day. | {then}{m} ounces a day "
              "are eaten for {k} days.", "{d} ounces are eaten.\nSo {e} ounces are left. | They eat {d} ounces.\nThen "
              "{e} ounces remain.", high=20),
        event("food", "cut", "The rain spoils {part} of the trail mix that is there at that time. | {then}{part} of "
              "the trail mix they have is given to another group.", "That is {d} ounces.\n{e} ounces are left. | They "
              "lose {d} ounces.\nThey still have {e} ounces."),
        event("food", "div", "All the trail mix they now have is put into {k} equal bags. | They now divide all the "
              "trail mix they have into {k} equal bags.", "Each bag gets {e} ounces. | One bag has {e} ounces.",
              to="share"),
        event("food", "div", "From then on, they eat {k} ounces a day. | Now they plan to eat {k} ounces every day "
              "until nothing is left.", "It lasts {e} days. | That is enough for {e} days.", to="days"),
        event("share", "sub", "{name} opens one of these bags and eats {n} ounces. | {name} takes one of these bags "
              "and eats {n} ounces out of it.", "{e} ounces are left in this bag. | In that bag, {e} ounces remain.",
              to="mine", high=40),
    ],
    {
        "food": "How many ounces of trail mix are left? | How many ounces of trail mix are there in the end?",
        "share": "How many ounces are in each bag? | How many ounces does one bag hold?",
        "days": "How many days does the trail mix last? | For how many days do they have enough?",
        "mine": "How many ounces are left in this bag?",
    },
    (
        ("The camp is {n} miles from the road.", 3, 30),
        ("Their tent weighs {n} pounds.", 5, 30),
        ("The highest hill near the camp is {n} feet tall.", 210, 950),
        ("It is {n} degrees outside that day.", 11, 95),
    ),
)  # fmt: skip

PHONE = story(
    "phone_minutes",
    [
        opening("minutes", "start", "{name}'s phone plan has {n} minutes a month. | At the start of the month, {name} "
                "has {n} minutes for phone calls.", low=60, high=900),
        opening("minutes", "groups", "{name} buys {k} phone cards with {m} minutes each. | {name} has {k} phone cards, "
                "and each is good for {m} minutes.", "{name} has {e} minutes. | The cards give {e} minutes.", low=15,
                high=80),
    ],
    [
        event("minutes", "sub", "{who} talks to {his} mother for {n} minutes. | {who} uses {n} minutes to call "
              "{friend}.", "Then {e} minutes are left. | That leaves {e} minutes.", high=150),
        event("minutes", "sub groups", "{then}{who} makes {k} calls of {m} minutes each. | For {k} days {who} uses {m} "
              "minutes a day.", "These calls take {d} minutes.\n{name} has {e} minutes left. | That is {d} "
              "minutes.\nSo {e} minutes remain.", high=30),
        event("minutes", "add", "{then}{who} gets {n} bonus minutes. | {who} pays for {n} extra minutes.", "Now {name} "
              "has {e} minutes. | With these, there are {e} minutes.", high=150),
        event("minutes", "cut", "In the next week, {who} uses {part} of the minutes {he} still has. | {then}{who} "
              "gives {part} of the minutes {he} has at that time to {friend}.", "That is {d} minutes.\n{name} keeps "
              "{e} minutes. | {d} minutes are gone.\nThen {e} minutes are left."),
        event("minutes", "div", "{who} wants to use the minutes {he} now has evenly over {k} days. | The minutes {he} "
              "has left must last for {k} days, with the same number each day.", "{name} can use {e} minutes a day. | "
              "That is {e} minutes a day.", to="daily"),
        event("minutes", "div", "From then on, every call {he} makes takes {k} minutes. | {who} plans to spend the "
              "minutes {he} now has on calls of {k} minutes each.", "{name} can make {e} calls. | That is enough for "
              "{e} calls.", to="calls"),
    ],
    {
        "minutes": "How many minutes does {name} have now? | How many minutes are left?",
        "daily": "How many minutes a day can {name} use?",
        "calls": "How many such calls can {name} make?",
    },
    (
        *PERSON_FACTS,
        ("{name}'s phone has {n} photos on it.", 120, 900),
        ("{name} has had this phone for {n} months.", 3, 50),
    ),
)  # fmt: skip

FACTORY = story(
    "factory",
    [
        opening("made", "groups", "A factory has {k} machines. Each machine makes {m} {things} in an hour, and all of "
                "them run for one hour. | In a factory, {k} workers make {m} {things} each.", "They make {e} {things}. "
                "| That is {e} {things}.", low=8, high=80),
        opening("made", "start", "A factory makes {n} {things} in one day. | A workshop produces {n} {things}.", low=30,
                high=600),
        opening("made", "pair", "A factory makes {n} {things} in the day shift and {m} in the night shift.", "In both "
                "shifts, it makes {e} {things}.", low=10, high=300),
    ],
    [
        event("made", "sub", "{n} of the {things} do not pass a test and are thrown away. | {n} of them have scratches "
              "and cannot be sold, so they are removed.", "{e} good {things} are left. | Without these, there are {e} "
              "{things}.", high=80),
        event("made", "add groups", "{then}{k} more {things} a minute are made for {m} minutes. | {k} other workers "
              "bring {m} {things} each.", "That adds {d} {things}.\nIn all there are {e} {things}. | These are {d} "
              "{things}.\nNow there are {e} {things}.", high=25),
        event("made", "cut", "{part} of the {things} that are there now are painted red, and the others are painted "
              "blue. | {then}{part} of the {things} that are there are sent abroad, and the others are painted blue.",
              "That is {d} {things}.\nThe other {e} {things} are painted blue. | {d} {things} are not painted "
              "blue.\nSo {e} {things} are blue.", to="blue"),
        event("blue", "div", "The blue {things} are packed in boxes of {k}. | The factory puts all the blue {things} "
              "into boxes, {k} to a box.", "They fill {e} boxes. | That makes {e} boxes.", to="boxes"),
        event("blue", "mul", "The blue {things} are all sold for ${k} each. | A store pays ${k} for every blue one.",
              "The blue {things} bring in {e} dollars. | The factory gets {e} dollars.", to="income"),
        event("made", "div", "All the {things} that are there now are packed in boxes of {k}. | Workers put all the "
              "{things} that are there now into boxes, {k} to a box.", "They fill {e} boxes. | There are {e} boxes.",
              to="boxes"),
        event("boxes", "mul", "Every box is sold for ${k}. | A store buys all the boxes for ${k} each.", "The boxes "
              "bring in {e} dollars. | The factory gets {e} dollars.", to="income"),
        event("boxes", "div", "All the boxes are loaded onto {k} trucks, equally many on each. | {k} trucks take the "
              "same number of boxes each.", "Each truck takes {e} boxes. | That is {e} boxes for one truck.",
              to="truck"),
        event("income", "sub", "The material costs ${n}. | The factory has to pay ${n} for electricity.", "After this, "
              "{e} dollars are left. | That leaves {e} dollars."),
    ],
    {
        "made": "How many {things} are there now? | How many {things} does that make in the end?",
        "blue": "How many {things} are painted blue? | How many blue {things} are there?",
        "boxes": "How many boxes are there? | How many boxes do they fill?",
        "truck": "How many boxes are on each truck?",
        "income": "How many dollars does the factory have from this in the end? | How much money, in dollars, does the "
        "factory make with these in the end?",
    },
    (
        *PLACE_FACTS,
        ("The factory's chimney is {n} feet tall.", 50, 190),
    ),
    things="chairs,toy trains,lamps,vases,buckets,clocks,birdhouses,helmets,teapots,stools",
)  # fmt: skip

PAINTING = story(
    "painting",
    [
        opening("paid", "groups", "{name} paints {k} rooms and gets ${m} for each room. | {name} paints fences for {k} "
                "neighbors, and each of them pays {him} ${m}.", "{name} gets {e} dollars. | That is {e} dollars.",
                low=15, high=80),
        opening("boards", "start", "{name} has to paint a fence with {n} boards. | {name} paints a long fence that is "
                "made of {n} boards.", low=30, high=400),
    ],
    [
        event("boards", "sub", "On Saturday {who} paints {n} boards. | {who} paints {n} of the boards before lunch.",
              "Then {e} boards are left to paint. | {name} still has {e} boards to paint.", high=120),
        event("boards", "sub groups", "{then}{who} paints {m} boards an hour for {k} hours. | {k} friends come and "
              "paint {m} boards each.", "That is {d} boards.\n{e} boards are not painted yet. | {d} boards get "
              "painted.\nSo {e} boards are left.", high=15),
        event("boards", "cut", "{then}{friend} paints {part} of the boards that are not painted yet. | {then}helpers "
              "paint {part} of the boards that are still to be painted.", "That is {d} boards.\nThen {e} boards are "
              "left. | {d} boards are done.\n{e} boards are still to be painted."),
        event("boards", "div", "{who} can paint {k} boards in an hour from now on. | {who} paints the rest at {k} "
              "boards an hour.", "The rest takes {e} hours. | {name} needs {e} hours.", to="hours"),
        event("boards", "mul", "{who} paints all the boards that are not painted yet and gets ${k} for each of these. "
              "| {name} is paid ${k} for each board that is not painted yet and paints them all.", "{name} gets {e} "
              "dollars. | That is {e} dollars.", to="money"),
        event("paid", "sub groups", "For this work {who} bought {k} cans of paint at ${m} each. | {who} has to pay "
              "${m} for each of {k} cans of paint.", "The paint costs {d} dollars.\n{name} has {e} dollars left. | "
              "{name} pays {d} dollars.\nThat leaves {e} dollars.", to="money", high=25),
        event("paid", "sub", "{who} has to pay ${n} for paint and brushes. | The paint costs {him} ${n}.", "That "
              "leaves {e} dollars. | After that, {name} has {e} dollars.", to="money"),
        *MONEY,
    ],
    {
        "boards": "How many boards are left to paint? | How many boards are not painted yet?",
        "hours": "How many hours does the rest take? | How many more hours does {name} need?",
        "paid": "How many dollars does {name} get?",
    } | MONEY_ASKS,
    (
        *PERSON_FACTS,
        ("{name}'s brush is {n} months old.", 3, 40),
        ("{name} listens to the radio for {n} minutes.", 15, 90),
    ),
)  # fmt: skip

STORIES: tuple[Story, ...] = (BUS, PARKING, ROAD_TRIP, HIKING, PHONE, FACTORY, PAINTING)
