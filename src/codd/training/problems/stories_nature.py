"""Stories of farms, gardens, water and animals."""

from codd.training.problems.stories_trade import MONEY, MONEY_ASKS
from codd.training.problems.story import Story, event, opening, story
from codd.training.problems.world import FISH, FRUIT, PERSON_FACTS, PLACE_FACTS, VEGETABLES

EGGS = story(
    "egg_farm",
    [
        opening("eggs", "start", "{name} collects {n} eggs from {his} hens in the morning. | The hens on {name}'s farm "
                "lay {n} eggs.", low=12, high=400),
        opening("eggs", "groups", "In one month, each of {name}'s {k} hens lays {m} eggs. | On {name}'s farm there are "
                "{k} henhouses. {name} finds {m} eggs in every henhouse.", "{name} collects {e} eggs. | That is {e} "
                "eggs.", low=5, high=28),
    ],
    [
        event("eggs", "sub", "{n} of the eggs crack on the way to the house. | {who} drops a basket, and {n} eggs "
              "break.", "After losing {n}, {name} has {e} eggs. | There are {e} whole eggs.", high=40),
        event("eggs", "sub groups", "{then}{who} uses {m} of the eggs for each of {k} cakes. | {who} gives {m} eggs to "
              "each of {k} neighbors.", "This takes {d} eggs.\n{name} has {e} eggs left. | {d} eggs are used up.\nThen "
              "{e} eggs remain.", high=12),
        event("eggs", "add", "{then}{who} finds {n} more eggs in the barn. | In the evening {who} collects another {n} "
              "eggs.", "Now {name} has {e} eggs. | In all that is {e} eggs."),
        event("eggs", "cut", "{then}{who} sells {part} of the eggs {he} now has to a hotel. | A baker takes {part} of "
              "the eggs {name} has at that time.", "The buyer gets {d} eggs.\n{name} keeps {e} eggs. | That is {d} "
              "eggs.\nSo {e} eggs are left."),
        event("eggs", "div", "{who} puts all the eggs {he} now has in cartons of a dozen. | {who} packs all {his} "
              "eggs, a dozen to a carton.", "{name} fills {e} cartons. | That makes {e} cartons.", to="cartons",
              low=12),
        event("eggs", "div", "{who} puts all the eggs {he} now has in boxes that hold {k} eggs each. | {who} packs all "
              "{his} eggs, {k} to a box.", "{name} fills {e} boxes. | That makes {e} boxes.", to="boxes"),
        event("cartons", "mul", "{who} sells all of the cartons for ${k} each. | A shop buys every carton for ${k}.",
              "{name} gets {e} dollars. | The sale brings in {e} dollars.", to="money"),
        event("boxes", "mul", "{who} sells all of the boxes for ${k} each. | A shop buys every box for ${k}.", "{name} "
              "gets {e} dollars. | The boxes bring in {e} dollars.", to="money"),
        *MONEY,
    ],
    {
        "eggs": "How many eggs does {name} have now? | How many eggs are left?",
        "cartons": "How many cartons does {name} fill? | How many cartons of eggs does {name} get?",
        "boxes": "How many boxes does {name} fill? | How many boxes of eggs are there?",
    } | MONEY_ASKS,
    (
        *PERSON_FACTS,
        ("{name} also keeps {n} sheep.", 4, 80),
        ("The barn on {name}'s farm is {n} feet long.", 25, 140),
    ),
)  # fmt: skip

ORCHARD = story(
    "orchard",
    [
        opening("fruit", "groups", "An orchard has {k} rows of trees. This season, each row gives {m} baskets of "
                "{things}. | {name} has {k} fields of fruit trees and picks {m} baskets of {things} in each field.",
                "The orchard gives {e} baskets. | In total {e} baskets of {things} are picked.", low=5, high=60),
        opening("fruit", "start", "{name} and {his} family pick {n} baskets of {things} in their orchard. | In "
                "September, {name} harvests {n} baskets of {things}.", low=12, high=400),
        opening("fruit", "pair", "{name} picks {n} baskets of {things} on Saturday and {m} baskets on Sunday.", "On "
                "both days together, that is {e} baskets. | {name} picks {e} baskets.", low=4, high=200),
    ],
    [
        event("fruit", "add", "{then}helpers pick {n} more baskets. | A few days later, another {n} baskets are "
              "picked.", "Now there are {e} baskets. | That makes {e} baskets.", high=150),
        event("fruit", "cut", "{then}{part} of the baskets that are there now go to a jam factory. | {then}the family "
              "sells {part} of the baskets it now has to a grocer.", "The buyer takes {d} baskets.\nThere are {e} "
              "baskets left. | {d} baskets go.\nThat leaves {e} baskets."),
        event("fruit", "sub", "{then}{n} baskets are given to the neighbors. | Deer get into the shed and eat {n} "
              "baskets of {things}.", "Then {e} baskets remain. | After that there are {e} baskets.", high=60),
        event("fruit", "div", "All the baskets that are there now are loaded equally onto {k} carts. | The baskets the "
              "family now has are stored in {k} cellars, the same number in each.", "Each one holds {e} baskets. | "
              "That is {e} baskets in each.", to="cart"),
        event("fruit", "mul", "Every basket that is there now gives {k} jars of jam. | From each of the baskets they "
              "now have, the family makes {k} jars of jam.", "They make {e} jars of jam. | That gives {e} jars.",
              to="jars"),
        event("jars", "sub", "The family keeps {n} jars and sells the others. | {n} of the jars break, and the others "
              "are sold.", "They sell {e} jars. | {e} jars are sold.", to="sold"),
        event("jars", "div", "The jars are packed in boxes of {k}. | All the jars go into boxes that hold {k} jars "
              "each.", "The jars fill {e} boxes. | They need {e} boxes.", to="boxes"),
    ],
    {
        "fruit": "How many baskets of {things} are there now? | How many baskets does the family have in the end?",
        "cart": "How many baskets are in each of them? | How many baskets does each one hold?",
        "jars": "How many jars of jam does the family make? | How many jars of jam is that?",
        "sold": "How many jars of jam are sold? | How many jars does the family sell?",
        "boxes": "How many boxes of jam jars are there? | How many boxes do they need for the jars?",
    },
    (
        *PERSON_FACTS,
        ("The oldest tree in {name}'s orchard is {n} years old.", 40, 140),
        ("{name}'s ladder is {n} feet long.", 7, 30),
    ),
    things=FRUIT,
)  # fmt: skip

GARDEN = story(
    "vegetable_garden",
    [
        opening("plants", "groups", "{name} plants {k} rows of {things} plants with {m} plants in each row. | In "
                "{name}'s garden there are {k} beds, and {he} sets {m} {things} plants in every bed.", "{name} has {e} "
                "plants. | That is {e} plants.", low=4, high=60),
        opening("plants", "start", "{name} grows {n} {things} plants in {his} garden. | {name} starts {his} garden "
                "with {n} young {things} plants.", low=10, high=300),
    ],
    [
        event("plants", "sub", "Rabbits eat {n} of the plants. | A storm destroys {n} of the plants.", "Then {e} "
              "plants are left. | {e} plants survive.", high=60),
        event("plants", "add groups", "{then}{who} adds {k} more rows of {m} plants. | {who} buys {k} trays with {m} "
              "plants each and plants them all.", "The new plants are {d}.\nNow there are {e} plants. | {name} adds "
              "{d} plants.\nThat makes {e} plants in all.", high=20),
        event("plants", "cut", "{then}{who} gives {part} of the plants {he} now has to a school garden. | Snails "
              "destroy {part} of the plants that are in the garden at that time.", "That is {d} plants.\n{e} plants "
              "stay in the garden. | {d} plants are gone.\nSo there are {e} plants left."),
        event("plants", "mul", "In the fall, each plant that is still there gives {k} pounds. | In summer {who} "
              "harvests {k} pounds from every plant {he} now has.", "The harvest is {e} pounds. | {name} harvests {e} "
              "pounds.", to="pounds"),
        event("plants", "div", "{who} moves all the plants {he} now has into boxes, {k} plants to a box. | All the "
              "plants that are there now go into boxes with {k} plants in each box.", "{name} needs {e} boxes. | They "
              "fill {e} boxes.", to="pots"),
        event("pounds", "sub", "{then}{his} family eats {n} pounds. | {who} gives {n} pounds of it to {friend}.",
              "Then {e} pounds are left. | That leaves {e} pounds.", to="rest"),
        event("pounds", "div", "{who} shares the harvest equally with some neighbors, so that {k} families, {his} own "
              "included, get the same amount. | The harvest is divided equally among {k} kitchens.", "Each one gets "
              "{e} pounds. | One share is {e} pounds.", to="share"),
        event("rest", "div", "{who} fills the pounds that are left into bags of {k} pounds. | The rest is put in bags "
              "that hold {k} pounds each.", "That fills {e} bags. | {name} fills {e} bags.", to="bags"),
        event("rest", "mul", "{who} sells the pounds that are left for ${k} a pound. | The rest is sold at ${k} a "
              "pound.", "{name} earns {e} dollars. | The sale brings in {e} dollars.", to="money"),
        *MONEY,
    ],
    {
        "plants": "How many plants are in the garden now? | How many plants does {name} have in the end?",
        "pots": "How many boxes does {name} need? | How many boxes of plants are there?",
        "pounds": "How many pounds does {name} harvest? | How many pounds is the harvest?",
        "share": "How many pounds does each of them get? | How many pounds is one share?",
        "rest": "How many pounds of the harvest are left? | How many pounds of the harvest does {name} still have "
        "then?",
        "bags": "How many bags are filled? | How many bags does {name} fill?",
    } | MONEY_ASKS,
    (
        *PERSON_FACTS,
        ("{name}'s garden fence is {n} feet long.", 35, 160),
        ("{name}'s garden hose is {n} feet long.", 25, 99),
    ),
    things="carrot,tomato,cabbage,onion,potato,pumpkin,pepper,bean,cucumber,zucchini",
)  # fmt: skip

FISHING = story(
    "fishing",
    [
        opening("fish", "start", "{name} goes out in {his} boat and catches {n} {things}. | {name} catches {n} "
                "{things} in the morning.", low=8, high=250),
        opening("fish", "groups", "{name} works on a fishing boat. The crew throws out {k} nets and finds {m} {things} "
                "in each of them. | {name} fishes for {k} days and catches {m} {things} every day.", "The catch is {e} "
                "{things}. | That makes {e} {things}.", low=5, high=70),
    ],
    [
        event("fish", "sub", "{n} of the {things} are too small and go back into the water. | {who} lets {n} of the "
              "{things} go because they are young.", "{e} {things} are kept. | After that, there are {e} {things}.",
              high=60),
        event("fish", "add", "In the afternoon another {n} {things} are caught. | {friend} catches {n} {things} and "
              "adds them to the catch.", "Now there are {e} {things}. | Together that is {e} {things}."),
        event("fish", "cut", "{then}{part} of the {things} on the boat at that moment are sold to a restaurant. | A "
              "seal gets {part} of all the {things} that are on the boat at that moment.", "That is {d} {things}.\n{e} "
              "{things} remain. | {d} {things} are gone.\nThe boat still has {e} {things}."),
        event("fish", "sub groups", "{then}{k} neighbors get {m} {things} each. | {k} cooks buy {m} {things} each.",
              "They get {d} {things}.\nThere are {e} {things} left. | That takes {d} {things}.\nAfter that, {e} "
              "{things} are left.", high=12),
        event("fish", "div", "All the {things} that are there now are put on ice in {k} boxes, the same number in "
              "each. | {who} spreads all the {things} that are there now evenly over {k} buckets.", "Each one holds "
              "{e} {things}. | That is {e} {things} in each.", to="box"),
        event("fish", "mul", "At the harbor, {who} sells all the {things} that are there now for ${k} each. | {who} "
              "sells all the {things} {he} now has at ${k} per fish.", "{name} gets {e} dollars. | The catch brings in "
              "{e} dollars.", to="money"),
        *MONEY,
    ],
    {
        "fish": "How many {things} are there now? | How many {things} are left in the end?",
        "box": "How many {things} are in each of them? | How many {things} does each one hold?",
    } | MONEY_ASKS,
    (
        *PERSON_FACTS,
        ("{name}'s boat is {n} feet long.", 12, 60),
        ("The lake is {n} feet deep at its deepest point.", 20, 180),
    ),
    things=FISH,
)  # fmt: skip

WATER = story(
    "water_tank",
    [
        opening("tank", "start", "A water tank has {n} gallons of water in it. | There are {n} gallons of water in "
                "{name}'s rain tank.", low=20, high=700),
        opening("tank", "groups", "A pump fills an empty tank with {m} gallons of water a minute. It runs for {k} "
                "minutes. | {name} pours {k} barrels of water into an empty tank. Each barrel holds {m} gallons.",
                "Then there are {e} gallons in the tank. | The tank gets {e} gallons.", low=5, high=75),
    ],
    [
        event("tank", "sub", "{name} uses {n} gallons to water the flowers. | {then}a cow drinks {n} gallons from it.",
              "That leaves {e} gallons. | Then {e} gallons are in the tank.", high=90),
        event("tank", "add", "{then}the rain adds {n} gallons. | Overnight, {n} gallons of rain fall into the tank.",
              "The tank then holds {e} gallons. | With the rain, there are {e} gallons.", high=200),
        event("tank", "sub groups", "A leak lets out {m} gallons an hour for {k} hours. | {then}{k} horses drink {m} "
              "gallons each.", "The tank loses {d} gallons.\nIt still holds {e} gallons. | That is {d} gallons.\nAfter "
              "that, {e} gallons are left.", high=20),
        event("tank", "add groups", "{then}{name} empties {k} buckets of {m} gallons into it. | A hose fills in {m} "
              "gallons a minute for {k} minutes.", "This adds {d} gallons.\nNow the tank has {e} gallons. | {d} "
              "gallons come in.\nThat makes {e} gallons.", high=15),
        event("tank", "cut", "{then}{part} of the water that is in the tank at this time is pumped onto a field. | On "
              "a hot day, {part} of the water then in the tank is used.", "That takes {d} gallons.\nThe tank keeps {e} "
              "gallons. | {d} gallons are used.\nSo {e} gallons remain."),
        event("tank", "div", "All the water that is in the tank now is filled into {k} equal barrels. | The water in "
              "the tank is then shared equally by {k} gardens.", "Each one gets {e} gallons. | One part is {e} "
              "gallons.", to="part"),
        event("tank", "div", "From now on, {k} gallons are used every day and no water is added. | {name} now uses {k} "
              "gallons a day until the tank is empty.", "The water lasts {e} days. | It takes {e} days to use it up.",
              to="days"),
        event("tank", "reach", "A full tank holds {n} gallons. | The tank has room for {n} gallons in all.", "There is "
              "room for {e} more gallons. | {e} gallons are missing.", to="room"),
    ],
    {
        "tank": "How many gallons of water are in the tank now? | How many gallons of water are in the tank at the "
        "end?",
        "part": "How many gallons does each of them get? | How many gallons go into each one?",
        "days": "How many days does the water last? | For how many days is there enough water?",
        "room": "How many more gallons of water fit into the tank? | How many gallons are missing until the tank is "
        "full?",
    },
    (
        ("The tank was bought {n} years ago.", 3, 60),
        ("{name} lives {n} miles from the nearest lake.", 3, 80),
        ("The tank is {n} feet away from the house.", 13, 99),
        ("It is {n} degrees outside that day.", 11, 95),
    ),
)  # fmt: skip

PETS = story(
    "pet_food",
    [
        opening("food", "start", "An animal shelter has {n} cans of {pet} food. | {name} takes care of many {pet}s and "
                "has {n} cans of {pet} food.", low=20, high=500),
        opening("food", "groups", "{name} buys {k} boxes of {pet} food for {his} animal shelter, with {m} cans in each "
                "box. | A shelter gets {k} packs of {pet} food, and every pack has {m} cans.", "There are {e} cans. | "
                "That makes {e} cans.", low=6, high=48),
    ],
    [
        event("food", "sub groups", "The {pet}s eat {m} cans a day for {k} days. | In the next {k} days, {m} cans a "
              "day are used.", "In {k} days they eat {d} cans.\nThen {e} cans are left. | That uses {d} cans.\nSo {e} "
              "cans remain.", high=15),
        event("food", "sub", "{n} of the cans are past their date and are thrown away. | {n} of the cans are given to "
              "another shelter.", "That leaves {e} cans. | There are {e} cans after that.", high=60),
        event("food", "add", "{then}a neighbor donates {n} cans. | {friend} drops off {n} more cans.", "Now there are "
              "{e} cans. | With the gift, there are {e} cans.", high=200),
        event("food", "add groups", "{then}{k} visitors bring {m} cans each. | {k} classes collect {m} cans each for "
              "the {pet}s.", "They bring {d} cans.\nThe shelter then has {e} cans. | That adds {d} cans.\nIn all there "
              "are {e} cans.", high=25),
        event("food", "cut", "{part} of the cans that are there now are given to a farm. | {then}{part} of the cans in "
              "stock at this point are used up in one week.", "That is {d} cans.\nThe stock is then {e} cans. | {d} "
              "cans go.\n{e} cans are left."),
        event("food", "div", "From now on, the {pet}s eat {k} cans every day. | The {pet}s will now get {k} cans a day "
              "until the food is gone.", "The food lasts {e} days. | It is enough for {e} days.", to="days"),
        event("food", "div", "All the cans that are there now are shared equally by {k} rooms with {pet}s. | The cans "
              "in stock are now stacked in {k} equal piles.", "Each one has {e} cans. | That is {e} cans for each.",
              to="pile"),
    ],
    {
        "food": "How many cans of {pet} food are left? | How many cans are there now?",
        "days": "How many days does the food last? | For how many days are there enough cans?",
        "pile": "How many cans are there in each of them? | How many cans is that for each one?",
    },
    (
        *PLACE_FACTS[:3],
        ("The oldest {pet} weighs {n} pounds.", 4, 30),
        ("One of the {pet}s is {n} months old.", 3, 80),
    ),
    pet="cat,dog,rabbit,hedgehog",
)  # fmt: skip

FARM_STAND = story(
    "harvest",
    [
        opening("crop", "start", "{name} digs up {n} {things} on {his} farm. | {name} harvests {n} {things}. | A "
                "farmer named {name} has {n} {things} in a barn.", low=20, high=600),
        opening("crop", "groups", "{name} fills {k} sacks with {m} {things} each. | {name} harvests {k} rows and gets "
                "{m} {things} from each row.", "{name} has {e} {things}. | That makes {e} {things}.", low=8, high=70),
    ],
    [
        event("crop", "sub", "{who} feeds {n} of the {things} to {his} pigs. | Mice spoil {n} of the {things}.", "Then "
              "{name} has {e} {things}. | {e} {things} are left.", high=90),
        event("crop", "add", "{then}{friend}, who has a field nearby, gives {him} {n} more {things}. | The next day "
              "{who} harvests {n} more {things}.", "Now {name} has {e} {things}. | That brings the number to {e} "
              "{things}."),
        event("crop", "sub groups", "{who} cooks {k} pots of soup and puts {m} {things} in each pot. | {then}{who} "
              "gives {m} {things} to each of {his} {k} workers.", "For this {name} needs {d} {things}.\n{name} has {e} "
              "{things} left. | That takes {d} {things}.\nSo {e} {things} remain.", high=15),
        event("crop", "part", "{who} counts what is in the barn now: {part} of the {things} are big enough to sell, "
              "and {he} keeps only those. | {who} keeps {part} of the {things} {he} now has and gives all the others "
              "away.", "{name} keeps {e} {things}. | That is {e} {things}."),
        event("crop", "div", "{who} puts all {his} {things} into crates of {k}. | Everything {he} now has is packed in "
              "crates, {k} {things} to a crate.", "That fills {e} crates. | {name} needs {e} crates.", to="crates"),
        event("crates", "add", "{friend} brings {n} crates of {things} too. | To these, {who} adds {n} crates from "
              "last week.", "In all there are {e} crates. | Now there are {e} crates.", high=30),
        event("crates", "mul", "At the market, every crate is sold for ${k}. | {who} sells all the crates for ${k} "
              "each.", "The crates bring in {e} dollars. | {name} gets {e} dollars.", to="money"),
        *MONEY,
    ],
    {
        "crop": "How many {things} does {name} have now? | How many {things} are left on the farm?",
        "crates": "How many crates are there now? | How many crates of {things} does {name} have?",
    } | MONEY_ASKS,
    (
        *PERSON_FACTS,
        ("{name}'s tractor is {n} years old.", 3, 45),
        ("{name}'s farm also has {n} goats.", 4, 60),
    ),
    things=VEGETABLES,
)  # fmt: skip

STORIES: tuple[Story, ...] = (EGGS, ORCHARD, GARDEN, FISHING, WATER, PETS, FARM_STAND)
