// Two comforts: a switch of the theme, and tables that sort by a click on a head. The page is whole without either.
'use strict';

const root = document.documentElement;
const button = document.getElementById('theme');
const system = matchMedia('(prefers-color-scheme: dark)');
const isDark = () => (root.dataset.theme || (system.matches ? 'dark' : 'light')) === 'dark';
const name = () => { button.textContent = isDark() ? 'Light theme' : 'Dark theme'; };
button.addEventListener('click', () => {
  root.dataset.theme = isDark() ? 'light' : 'dark';
  name();
});
system.addEventListener('change', name);
button.hidden = false;
name();

const valueOf = (row, place) => {
  const cell = row.cells[place];
  return cell.dataset.value === undefined ? null : Number(cell.dataset.value);
};

function compare(one, other, place) {
  const [a, b] = [valueOf(one, place), valueOf(other, place)];
  if (a !== null && b !== null) return a - b;
  if (a !== null || b !== null) return a === null ? 1 : -1;
  return one.cells[place].textContent.trim().localeCompare(other.cells[place].textContent.trim());
}

for (const table of document.querySelectorAll('table')) {
  const heads = table.tHead.rows[table.tHead.rows.length - 1].cells;
  Array.from(heads).forEach((head, place) => {
    const sorter = document.createElement('button');
    sorter.type = 'button';
    sorter.className = 'sorter';
    sorter.append(...head.childNodes);
    head.append(sorter);
    sorter.addEventListener('click', () => {
      const down = head.getAttribute('aria-sort') === 'ascending';
      for (const each of heads) each.removeAttribute('aria-sort');
      head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
      const rows = Array.from(table.tBodies[0].rows).sort((a, b) => compare(a, b, place));
      table.tBodies[0].append(...(down ? rows.reverse() : rows));
    });
  });
}
